"""Case 6: a step whose gradients overflow leaves everything as it was, but for the loss scale."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from stages.api import Session
from tests.cases import scaled_losses
from tests.cases.sessions import (
    assert_same,
    frugal,
    placed,
    prepared,
    seeded,
    train,
    train_plainly,
    training_state,
)
from tests.reference import LossScale

#: a scale under which T2 does not overflow by itself
INITIAL = 2.0**10
BATCHES = scaled_losses.batches(1.0, inf, 1.0, 1.0)


@pytest.mark.parametrize("hysteresis", [1, 2])
def test_an_overflow_in_step_2_changes_only_the_scale(hysteresis: int, tmp_path: Path) -> None:
    scale = {"initial": INITIAL, "hysteresis": hysteresis}
    model = seeded(scaled_losses.Scaled)
    before = placed(prepared(model, BATCHES[0], precision="fp16", loss_scale=scale), tmp_path)
    plan = frugal(before)
    with Session(model, before, plan) as session:
        engine = session._open_engine()
        session.step(BATCHES[0])
        state, counts = training_state(session), engine.update_counts
        done = session.step_in_full(BATCHES[1])
        assert done.skipped
        assert done.grad_norm is None
        assert done.loss_scale == INITIAL
        assert training_state(session) == state
        assert engine.update_counts == counts
        # as the predecessor's: with its hysteresis of 2 the first overflow is let pass
        assert engine.guard.scale == (INITIAL / 2 if hysteresis == 1 else INITIAL)
        assert not session.step_in_full(BATCHES[2]).skipped
        assert training_state(session) != state
    with Session(model, before, plan) as session:
        found = train(session, BATCHES, steps=8)
    expected = train_plainly(
        scaled_losses.Scaled,
        BATCHES,
        steps=8,
        precision="fp16",
        scale=LossScale(value=INITIAL, hysteresis=hysteresis),
    )
    assert expected.skipped_steps == [2, 6]
    assert_same(found, expected)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_other_precisions_skip_too_where_asked_to(precision: str, tmp_path: Path) -> None:
    model = seeded(scaled_losses.Scaled)
    before = placed(prepared(model, BATCHES[0], precision=precision, skip_limit=3), tmp_path)
    with Session(model, before, frugal(before)) as session:
        found = train(session, BATCHES, steps=8)
    expected = train_plainly(
        scaled_losses.Scaled, BATCHES, steps=8, precision=precision, skip_non_finite=True
    )
    assert expected.skipped_steps == [2, 6]
    assert_same(found, expected)
