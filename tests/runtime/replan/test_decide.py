"""When the first steps of a run make it plan again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.runtime.replan.decide import Observation, Verdict, describe, judge

#: a step of 1 s as predicted, of which compute takes half; 100 more to come
AS_PREDICTED = Observation(
    step_ns=10**9,
    predicted_step_ns=10**9,
    peak_bytes=10**9,
    predicted_peak_bytes=10**9,
    margin_bytes=10**7,
    least_step_ns=5 * 10**8,
    steps_left=100,
    price_ns=10**10,
)


def test_what_is_as_predicted_goes_on() -> None:
    assert judge(AS_PREDICTED) is Verdict.AS_PREDICTED


@pytest.mark.parametrize(
    ("predicted_ns", "off"),
    [(870_000_000, False), (860_000_000, True), (1_170_000_000, False), (1_180_000_000, True)],
)
def test_time_is_off_beyond_15_percent_of_the_prediction_either_way(predicted_ns: int, off: bool) -> None:
    observed = replace(AS_PREDICTED, predicted_step_ns=predicted_ns)
    assert (judge(observed) is Verdict.SOLVE_AGAIN) == off


@pytest.mark.parametrize(
    "change",
    [{"steps_left": 30}, {"price_ns": 3 * 10**10}, {"least_step_ns": 95 * 10**7}],
    ids=["few steps", "dear", "compute bound"],
)
def test_time_that_is_off_is_left_where_no_plan_could_win_back_the_change(change: dict[str, int]) -> None:
    observed = replace(AS_PREDICTED, predicted_step_ns=5 * 10**8)
    assert judge(observed) is Verdict.SOLVE_AGAIN
    assert judge(replace(observed, **change)) is Verdict.GO_ON


@pytest.mark.parametrize(
    ("excess_bytes", "off"), [(5 * 10**6, False), (5 * 10**6 + 1, True), (-(10**8), False)]
)
def test_memory_is_off_beyond_half_the_margin_whatever_it_costs(excess_bytes: int, off: bool) -> None:
    observed = replace(AS_PREDICTED, peak_bytes=10**9 + excess_bytes, price_ns=10**15)
    assert (judge(observed) is Verdict.SOLVE_AGAIN) == off


def test_after_the_last_step_nothing_is_solved() -> None:
    observed = replace(AS_PREDICTED, peak_bytes=2 * 10**9, predicted_step_ns=1, steps_left=0)
    assert judge(observed) is Verdict.AS_PREDICTED


def test_what_was_found_is_readable() -> None:
    said = describe(replace(AS_PREDICTED, predicted_step_ns=8 * 10**8))
    assert "1.000 s, predicted 0.800 s (+25%)" in said
    assert "1000.0MB" in said
