from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.artifacts.errors import InfeasibleBudgetError
from stages.solve.solvers import SOLVERS
from tests.solve.planning import ROOMY, least_of, plan_of
from tests.solve.strategies import sketches
from tests.solve.synthetic import MEGA, Sketch, chain

SOLVER_NAMES = tuple(SOLVERS)
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("solver", SOLVER_NAMES)
@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(sketch=sketches(), tightness=st.floats(0, 1))
def test_every_plan_verifies_inside_its_budget(solver: str, sketch: Sketch, tightness: float) -> None:
    least = least_of(sketch, solver)
    most = max(least, plan_of(sketch, ROOMY, solver).prediction.peak_bytes + 20 * MEGA)
    budget = least + round((most - least) * tightness)
    plan = plan_of(sketch, budget, solver)  # run() verifies
    assert plan.prediction.peak_bytes + plan.margin_bytes <= budget
    assert plan.prediction.least_feasible_bytes == least


@pytest.mark.parametrize("solver", SOLVER_NAMES)
@settings(max_examples=10, deadline=None, suppress_health_check=SLOW)
@given(sketch=sketches())
def test_named_least_budget_plans_and_one_percent_less_does_not(solver: str, sketch: Sketch) -> None:
    least = least_of(sketch, solver)
    assert plan_of(sketch, least, solver).budget_bytes == least
    with pytest.raises(InfeasibleBudgetError) as refusal:
        plan_of(sketch, least * 99 // 100, solver)
    assert refusal.value.least_feasible_bytes == least


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resident_moves_nothing(precision: str) -> None:
    plan = plan_of(chain(precision=precision), ROOMY, "resident")
    assert plan.prediction.moved_bytes == {"read": 0, "write": 0}
    assert plan.disk_bytes == 0


@pytest.mark.parametrize("solver", ["greedy_sync", "greedy_async"])
def test_greedy_moves_nothing_where_everything_fits(solver: str) -> None:
    plan = plan_of(chain(), ROOMY, solver)
    assert plan.prediction.moved_bytes == {"read": 0, "write": 0}


def test_resident_refuses_what_greedy_plans() -> None:
    sketch = chain(8)
    budget = (least_of(sketch, "resident") + least_of(sketch, "greedy_async")) // 2
    plan_of(sketch, budget, "greedy_async")
    with pytest.raises(InfeasibleBudgetError, match="greedy_async"):
        plan_of(sketch, budget, "resident")


def test_layerwise_streams_every_region_but_the_last() -> None:
    plan = plan_of(chain(5), ROOMY, "layerwise")
    assert [region.weights for region in plan.placement.regions] == ["streamed"] * 4 + ["resident"]


def test_async_is_never_slower_than_sync() -> None:
    sketch = chain(8, precision="bf16", tied=True)
    least = least_of(sketch, "greedy_async")
    for budget in (least, least + 20 * MEGA, least + 60 * MEGA, least + 150 * MEGA):
        asynchronous = plan_of(sketch, budget, "greedy_async").prediction.step_ns
        assert asynchronous <= plan_of(sketch, budget, "greedy_sync").prediction.step_ns


def test_async_fetches_ahead_where_memory_allows() -> None:
    plan = plan_of(chain(8), 80 * MEGA, "greedy_async")
    streamed = [index for index, region in enumerate(plan.placement.regions) if region.weights == "streamed"]
    assert streamed
    assert any(plan.placement.prefetch[index] > 0 for index in streamed)


def test_sync_fetches_nothing_ahead() -> None:
    plan = plan_of(chain(8), 80 * MEGA, "greedy_sync")
    assert set(plan.placement.prefetch) == {0}


def test_state_of_tiny_parameters_stays_where_there_is_room() -> None:
    plan = plan_of(chain(8, weight=2_000_000), 120 * MEGA, "greedy_async")
    assert all(plan.placement.state[f"b{index}"] == "resident" for index in range(8))


@pytest.mark.parametrize("solver", SOLVER_NAMES)
def test_checkpoint_blocks_are_always_recomputed(solver: str) -> None:
    sketch = chain(4)
    sketch.blocks[1].checkpoint = 7
    plan = plan_of(sketch, ROOMY, solver)
    assert plan.placement.regions[1].activations == "recompute"


def test_refusal_names_what_binds_and_what_helps() -> None:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        plan_of(chain(), 20 * MEGA)
    message = str(refusal.value)
    assert "What binds: phase step" in message
    assert "region" in message or "backward r" in message or "forward r" in message
    assert "data.batch_size" in message


def test_no_budget_under_the_peak_of_an_earlier_stage() -> None:
    sketch = chain(2, stage_peak_bytes=700 * MEGA)
    assert least_of(sketch, "greedy_async") == 700 * MEGA
    with pytest.raises(InfeasibleBudgetError, match="stage before training"):
        plan_of(sketch, 699 * MEGA)


def test_disk_budget_is_kept_or_refused() -> None:
    from stages.config import TiersConfig
    from stages.solve.stage import run
    from tests.solve.planning import config

    sketch = chain(6)
    settings_ = config(least_of(sketch, "greedy_async"))
    settings_.tiers = TiersConfig(disk_budget="1MB")
    with pytest.raises(InfeasibleBudgetError) as refusal:
        run(settings_, sketch.graph(), sketch.costs())
    assert refusal.value.key == "tiers.disk_budget"


def test_a_small_disk_is_enough_where_memory_is_not_short() -> None:
    from stages.config import TiersConfig
    from stages.solve.stage import run
    from tests.solve.planning import config

    settings_ = config(ROOMY)
    settings_.tiers = TiersConfig(disk_budget="1MB")
    sketch = chain(6)
    assert run(settings_, sketch.graph(), sketch.costs())[0].disk_bytes <= MEGA


def test_margin_is_at_least_eight_megabytes_and_one_percent() -> None:
    assert plan_of(chain(2), 500 * MEGA).margin_bytes == 8 * MEGA
    assert plan_of(chain(2), 5000 * MEGA).margin_bytes == 50 * MEGA
