"""Case 30: one moved Linear called twice. Its gradient is the sum of both calls'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.api import Session
from stages.artifacts.plan import Plan
from tests.cases.sessions import (
    assert_same,
    frugal,
    gradients_seen,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import BY_NAME

TWICE = "linear.weight"


def reads_of(plan: Plan, name: str) -> int:
    """How often a step fetches a weight."""
    step = next(phase for phase in plan.phases if phase.name == "step")
    owners = [
        plan.buffers[access.buffer]
        for instruction in step.instructions
        if instruction.operation == "read"
        for access in instruction.writes
    ]
    return sum(buffer.role == "weight" and buffer.owner == name for buffer in owners)


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
@pytest.mark.parametrize("name", ["linear_twice", "block_twice"])
def test_calls_of_one_module_add_up(name: str, lane: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    batches = model.batches(3)
    before = prepared_small(name, tmp_path, lane)
    expected = train_plainly(model.build, batches)
    with gradients_seen() as gradients, Session(seeded(model.build), before, frugal(before)) as session:
        found = train(session, batches)
    assert_same(found, expected)
    for step, (seen, wanted) in enumerate(zip(gradients, expected.gradients, strict=True), start=1):
        assert set(seen) == set(wanted)
        for parameter, gradient in wanted.items():
            assert torch.equal(seen[parameter], gradient), f"{parameter} in step {step}"


def test_the_linear_is_fetched_anew_in_every_step(tmp_path: Path) -> None:
    assert reads_of(frugal(prepared_small("linear_twice", tmp_path)), TWICE) >= 1
