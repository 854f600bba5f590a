"""The budget curve: both ends, no point slower than the one before, bounds below."""

from __future__ import annotations

import dataclasses

import pytest

from stages.artifacts.curve import Curve
from stages.artifacts.errors import InfeasibleBudgetError
from stages.config import DataConfig, ModelConfig
from stages.solve import curve as curves
from stages.solve.stage import run as solve
from tests.solve.planning import config
from tests.solve.synthetic import Sketch, chain


def curve_of(sketch: Sketch, points: int = 5) -> Curve:
    settings = dataclasses.replace(
        config(1, "auto", sketch.precision),
        model=ModelConfig("sketch", "module", "package.Sketch"),
        data=DataConfig("random"),
        budget="curve",
    )
    return curves.run(settings, sketch.graph(), sketch.costs(), points=points)


@pytest.fixture(scope="module")
def curve() -> Curve:
    return curve_of(chain(6))


def test_it_begins_at_the_least_feasible_budget(curve: Curve) -> None:
    sketch, least = chain(6), curve.points[0].budget_bytes
    assert solve(config(least, "auto"), sketch.graph(), sketch.costs())[0].budget_bytes == least
    with pytest.raises(InfeasibleBudgetError):
        solve(config(least * 99 // 100, "auto"), sketch.graph(), sketch.costs())


def test_nothing_moves_at_its_end(curve: Curve) -> None:
    last = curve.points[-1]
    assert not any(last.moved_bytes.values())
    assert last.placement["weights"] == {"resident": 6}


def test_more_memory_never_costs_time(curve: Curve) -> None:
    steps = [point.step_ns for point in curve.points]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_every_point_is_inside_its_budget_and_above_its_bound(curve: Curve) -> None:
    for point in curve.points:
        assert point.peak_bytes < point.budget_bytes
        assert 0 < point.lower_bound_ns <= point.step_ns


def test_budgets_are_spaced_evenly_in_ratio_with_both_ends() -> None:
    assert list(curves._spaced(100, 1600, 5)) == [100, 200, 400, 800, 1600]
    assert list(curves._spaced(100, 100, 5)) == [100]
