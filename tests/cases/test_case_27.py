"""Case 27: dropout in bf16, recomputed. The same masks, gradients and generator as without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.api import Session
from tests import reference
from tests.cases.sessions import (
    STEPS,
    assert_same,
    forced,
    gradients_seen,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import GPT2

BATCHES = GPT2.batches(3)


def trained(
    activations: str, disk: Path, lane: str = "cpu"
) -> tuple[reference.Result, list[dict[str, Tensor]]]:
    before = prepared_small("gpt2", disk, lane, precision="bf16")
    plan = forced(before, activations)
    with gradients_seen() as gradients, Session(seeded(GPT2.build), before, plan) as session:
        result = train(session, BATCHES)
    assert len(gradients) == STEPS
    return result, gradients


def assert_same_gradients(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    for step, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        assert set(one) == set(other)
        for name, gradient in other.items():
            assert torch.equal(one[name], gradient), f"{name} in step {step}"


def test_the_model_drops_out() -> None:
    config = seeded(GPT2.build).config
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.1, 0.1, 0.1)


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_recomputed_is_bitwise_kept(lane: str, tmp_path: Path) -> None:
    kept, kept_gradients = trained("keep", tmp_path)
    recomputed, gradients = trained("recompute", tmp_path, lane)
    assert_same_gradients(gradients, kept_gradients)
    assert_same(recomputed, kept)


def test_both_are_bitwise_the_plain_loop(tmp_path: Path) -> None:
    expected = train_plainly(GPT2.build, BATCHES, precision="bf16")
    recomputed, gradients = trained("recompute", tmp_path)
    assert_same_gradients(gradients, expected.gradients)
    assert_same(recomputed, expected)
