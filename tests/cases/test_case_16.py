"""Case 16: tied weights. One gradient, one update, and a file that keeps the tie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model
from torch import nn

from stages.api import Prepared, Session
from tests.cases.sessions import (
    assert_same,
    assert_same_tensors,
    forced,
    frugal,
    gradients_seen,
    placed,
    prepared,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import GPT2

TIES = {
    "transformer.wte.weight": "lm_head.weight",
    "transformer.h.0.mlp.c_fc.weight": "transformer.h.1.mlp.c_fc.weight",
}


def twice_tied() -> nn.Module:
    """GPT-2, whose head is tied to its embedding, with one more weight that two blocks share."""
    model = GPT2.build()
    model.transformer.h[1].mlp.c_fc.weight = model.transformer.h[0].mlp.c_fc.weight
    return model


@cache
def traced(precision: str) -> Prepared:
    return prepared(seeded(twice_tied), GPT2.batches(1)[0], precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_gradients_are_summed_once_and_applied_once(precision: str, lane: str, tmp_path: Path) -> None:
    batches = GPT2.batches(3)
    before = placed(traced(precision), tmp_path, lane)
    with gradients_seen() as gradients, Session(seeded(twice_tied), before, frugal(before)) as session:
        found = train(session, batches)
    expected = train_plainly(twice_tied, batches, precision=precision)
    assert_same(found, expected)
    for seen, wanted in zip(gradients, expected.gradients, strict=True):
        assert set(seen) == set(wanted)
        for name in TIES:
            assert torch.equal(seen[name], wanted[name]), name


@pytest.mark.parametrize("activations", ["keep", "recompute", "move"])
def test_ties_do_not_depend_on_what_becomes_of_activations(activations: str, tmp_path: Path) -> None:
    batches = GPT2.batches(2)
    before = placed(traced("fp32"), tmp_path)
    with Session(seeded(twice_tied), before, forced(before, activations)) as session:
        found = train(session, batches, steps=3)
    assert_same(found, train_plainly(twice_tied, batches, steps=3))


def test_a_tied_weight_has_one_home(tmp_path: Path) -> None:
    plan = frugal(placed(traced("bf16"), tmp_path))
    owners = {buffer.owner for buffer in plan.buffers}
    assert set(TIES) <= owners
    assert not owners & set(TIES.values())


def test_a_strict_reload_keeps_the_alias(tmp_path: Path) -> None:
    before = placed(traced("fp32"), tmp_path / "disk")
    with Session(seeded(twice_tied), before, frugal(before)) as session:
        train(session, GPT2.batches(2), steps=2)
        session.save(tmp_path / "saved")
        state = session.state_dict()
    for first, second in TIES.items():
        assert state[first] is state[second]
    fresh = twice_tied()
    load_model(fresh, tmp_path / "saved" / "model.safetensors", strict=True)
    names = dict(fresh.named_parameters(remove_duplicate=False))
    for first, second in TIES.items():
        assert names[first] is names[second]
    assert_same_tensors(fresh.state_dict(), state)
