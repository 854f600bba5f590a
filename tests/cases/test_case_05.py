"""Case 5: one norm over all gradients, wherever they are, taken of unscaled ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.api import Session
from stages.artifacts.plan import Plan
from tests.cases.sessions import (
    AMPLE,
    assert_same,
    least_budget,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import GPT2

MAX_NORM = 0.1


@pytest.mark.parametrize(
    "precision",
    ["fp16", pytest.param("fp32", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)],
)
def test_the_norm_spans_what_moves_and_what_stays(precision: str, tmp_path: Path) -> None:
    """T2, about half of its weights moved, clipped to 0.1: norms and result of the plain loop."""
    before = prepared_small("gpt2", tmp_path, precision=precision, max_grad_norm=MAX_NORM)
    least = least_budget(before)
    needed = before.plan(AMPLE).prediction.peak_bytes - before.plan(least).prediction.peak_bytes
    plan = before.plan(least + needed // 2)
    assert moved_share(plan) not in (0.0, 1.0)
    batches = GPT2.batches(4)
    with Session(seeded(GPT2.build), before, plan) as session:
        found = train(session, batches)
    expected = train_plainly(GPT2.build, batches, precision=precision, max_grad_norm=MAX_NORM)
    clipped = [norm for norm in expected.norms if norm is not None and norm > MAX_NORM]
    assert len(clipped) > 5, "hardly anything was clipped"
    assert found.norms == expected.norms
    assert_same(found, expected)


def moved_share(plan: Plan) -> float:
    """Share of the optimizer's state that is on disk between steps."""
    state = [buffer for buffer in plan.buffers if buffer.role in ("state", "master")]
    return sum(not buffer.resident for buffer in state) / len(state)
