"""The micro-batch benchmark finds what does not hold."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.vertical import TOLERANCE, Run, joined, problems_of

BUDGET = 10**9
VERTICAL = "4, vertical"


def _summary(step_s: float, *, loss: float = 3.0, peak_bytes: int = BUDGET) -> dict[str, Any]:
    return {"step_times_s": [9.0, step_s, step_s], "losses": [loss], "peak_bytes": peak_bytes}


def _runs(whole: dict[str, Any] | None, cut: dict[str, Any] | None, slices: str = VERTICAL) -> list[Run]:
    return [_run("given", whole, "1"), _run("auto", cut, slices)]


def _run(cut: str, summary: dict[str, Any] | None, slices: str) -> Run:
    times = tuple(summary["step_times_s"][1:]) if summary else ()
    return Run(BUDGET, cut, summary, slices, times)


def test_a_faster_vertical_cut_is_no_problem() -> None:
    assert problems_of(_runs(_summary(2.0), _summary(1.0))) == []


def test_a_budget_that_only_the_cut_fits_is_no_problem() -> None:
    assert problems_of(_runs(None, _summary(1.0))) == []


def test_what_does_not_hold_is_told() -> None:
    assert problems_of(_runs(_summary(1.0), _summary(1.2))) == [f"at {BUDGET}: cut 1.20 s, whole 1.00 s"]
    assert "is above the budget" in problems_of(_runs(_summary(1.0, peak_bytes=BUDGET + 1), _summary(1.0)))[0]
    off = _summary(1.0, loss=3.0 * (1 + 2 * TOLERANCE))
    assert "a loss is off by" in problems_of(_runs(_summary(1.0), off))[0]


def test_a_refusal_of_auto_alone_is_a_problem() -> None:
    refused = _runs(_summary(1.0), None)
    fine = _runs(_summary(2.0), _summary(1.0))
    assert problems_of(refused + fine) == [f"at {BUDGET}: auto was refused, the whole batch was not"]


def test_no_vertical_cut_at_all_is_a_problem() -> None:
    assert problems_of(_runs(_summary(1.0), _summary(1.0), slices="1")) == ["no run was cut vertically"]


def test_repeats_join_to_all_step_times_and_the_largest_peak() -> None:
    repeats = [_runs(_summary(1.0), None), _runs(_summary(3.0, peak_bytes=BUDGET + 1), None)]
    whole, refused = joined(repeats)
    assert whole.step_times_s == (1.0, 1.0, 3.0, 3.0)
    assert whole.step_s == 2.0
    assert whole.summary is not None
    assert whole.summary["peak_bytes"] == BUDGET + 1
    assert refused.summary is None


def test_a_setting_that_is_refused_at_times_only_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="some repeats only"):
        joined([_runs(_summary(1.0), None), _runs(None, None)])
