"""Case 9: adapters inside a frozen model. Recomputed regions must still pass gradients to them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Prepared, Session
from tests.cases.sessions import (
    STEPS,
    assert_same,
    forced,
    gradients_seen,
    placed,
    prepared,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import GPT2

RANK = 2


class Adapted(nn.Module):
    """A frozen layer plus a trained correction of rank 2."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_with_adapters() -> nn.Module:
    model = GPT2.build().requires_grad_(False)
    for block in model.transformer.h:
        for owner, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc")):
            base = getattr(owner, name)  # GPT-2 stores [inputs, outputs]
            setattr(owner, name, Adapted(base, *base.weight.shape))
    return model


@cache
def traced(precision: str) -> Prepared:
    return prepared(seeded(frozen_with_adapters), GPT2.batches(1)[0], precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_every_adapter_gets_its_gradient(precision: str, lane: str, tmp_path: Path) -> None:
    batches = GPT2.batches(3)
    before = placed(traced(precision), tmp_path, lane)
    plan = forced(before, "recompute")
    with gradients_seen() as gradients, Session(seeded(frozen_with_adapters), before, plan) as session:
        found = train(session, batches)
    expected = train_plainly(frozen_with_adapters, batches, precision=precision)
    assert_same(found, expected)
    names = [name for name, p in frozen_with_adapters().named_parameters() if p.requires_grad]
    assert len(names) == 2 * 3 * 2
    assert len(gradients) == STEPS
    for seen, wanted in zip(gradients, expected.gradients, strict=True):
        assert set(seen) == set(names)
        for name in names:
            assert seen[name].any(), f"{name} got zeros"
            assert torch.equal(seen[name], wanted[name]), name


def test_the_frozen_part_has_no_optimizer_state(tmp_path: Path) -> None:
    plan = forced(placed(traced("bf16"), tmp_path), "recompute")
    owners = {buffer.owner for buffer in plan.buffers if buffer.role in ("state", "master", "gradient")}
    assert owners
    assert all(".up." in owner or ".down." in owner for owner in owners)
