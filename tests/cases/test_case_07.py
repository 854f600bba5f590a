"""Case 7: gradients that never become finite end the run with the name of a parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.api import Session
from stages.artifacts.errors import NumericsError
from tests.cases import scaled_losses
from tests.cases.sessions import AMPLE, frugal, placed, prepared, seeded, training_state

LIMIT = 3
#: every later step is as before the first: what the last one left in a gradient's place must not count
BATCHES = scaled_losses.batches(1.0, 1e30)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_error_after_n_skips_names_the_first_parameter(precision: str, tmp_path: Path) -> None:
    # bf16 holds 1e30, but not its products with weights of a wide loss: only fp16 overflows there
    factor = 1e30 if precision == "fp16" else float("nan")
    good, bad = scaled_losses.batches(1.0, factor)
    model = seeded(scaled_losses.Scaled)
    settings = {"precision": precision, "skip_limit": LIMIT, "loss_scale": {"initial": 2.0**10}}
    before = placed(prepared(model, good, **settings), tmp_path)
    with Session(model, before, frugal(before)) as session:
        session.step(good)
        state = training_state(session)
        for _ in range(LIMIT - 1):
            assert session.step_in_full(bad).skipped
        with pytest.raises(NumericsError, match=f"in {LIMIT} steps in a row") as refusal:
            session.step(bad)
        assert refusal.value.key == "train.skip_limit"
        assert refusal.value.found == "model.transformer.wte.weight"
        assert training_state(session) == state
        # whoever goes on all the same finds nothing of the overflow left
        assert not session.step_in_full(good).skipped


def test_no_overflow_is_reported_from_what_an_earlier_step_left(tmp_path: Path) -> None:
    """Skipped and clean steps in turn, poisoned memory: the count of skips starts anew each time."""
    model = seeded(scaled_losses.Scaled)
    settings = {"precision": "fp16", "skip_limit": 2, "loss_scale": {"initial": 2.0**10, "hysteresis": 1}}
    before = placed(prepared(model, BATCHES[0], **settings), tmp_path, "adversarial")
    with Session(model, before, frugal(before)) as session:
        skipped = [session.step_in_full(BATCHES[step % 2]).skipped for step in range(8)]
        assert skipped == [False, True] * 4
        assert session._open_engine().guard.scale == 2.0**6


def test_without_a_limit_fp32_ends_at_the_first_and_says_what_was_updated(tmp_path: Path) -> None:
    model = seeded(scaled_losses.Scaled)
    good, bad = scaled_losses.batches(1.0, float("inf"))
    before = placed(prepared(model, good), tmp_path)
    with Session(model, before, before.plan(AMPLE)) as session:
        session.step(good)
        with pytest.raises(NumericsError, match=r"in a step.*go on from a checkpoint"):
            session.step(bad)
        with pytest.raises(NumericsError, match="different steps"):
            session.step(good)
