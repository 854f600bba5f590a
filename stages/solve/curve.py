"""Plans over budgets, from the least feasible to the all-resident one.

Run by the pipeline where `budget=curve` (`+sweep=budget`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from stages.artifacts.costs import Costs
from stages.artifacts.curve import Curve, CurvePoint
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.config import RunConfig, format_size
from stages.process import Order, stage_main
from stages.solve.stage import run as solve
from stages.solve.task import budget_for

POINTS = 9

#: more than any machine has
_ROOMY_BYTES = 10**15


def run(config: RunConfig, graph: RegionGraph, costs: Costs, *, points: int = POINTS) -> Curve:
    """Plans `points` budgets, evenly spaced on a logarithmic scale, both ends included.

    A plan for a smaller budget is one for a larger one too, so no point is slower than the one before.

    Raises:
        InfeasibleBudgetError: No budget works (host memory or disk do not hold the training state).
    """
    least = _least_bytes(config, graph, costs)
    most = max(least, _all_resident_bytes(config, graph, costs))
    found: list[CurvePoint] = []
    for budget_bytes in _spaced(least, most, points):
        plan = _plan(config, graph, costs, budget_bytes)
        point = _point(plan)
        if found and found[-1].step_ns < point.step_ns:
            point = _carried(found[-1], point)
        found.append(point)
        print(f"{format_size(budget_bytes)}: {point.step_ns / 1e9:.3f} s a step", flush=True)
    return Curve(
        model=config.model.name,
        device=costs.device,
        precision=config.precision,
        solver=config.solver.name,
        tokens=config.data.batch_size * config.data.seq_len,
        points=found,
    )


def _plan(config: RunConfig, graph: RegionGraph, costs: Costs, budget_bytes: int, solver: str = "") -> Plan:
    settings = dataclasses.replace(config.solver, name=solver or config.solver.name)
    return solve(dataclasses.replace(config, budget=str(budget_bytes), solver=settings), graph, costs)[0]


def _least_bytes(config: RunConfig, graph: RegionGraph, costs: Costs) -> int:
    """What the solver names when it refuses a budget that nothing fits."""
    try:
        plan = _plan(config, graph, costs, 1)
    except InfeasibleBudgetError as refusal:
        if refusal.least_feasible_bytes is None:
            raise  # not the budget binds
        return refusal.least_feasible_bytes
    return plan.budget_bytes


def _all_resident_bytes(config: RunConfig, graph: RegionGraph, costs: Costs) -> int:
    plan = _plan(config, graph, costs, _ROOMY_BYTES, solver="resident")
    return budget_for(plan.prediction.peak_bytes)


def _spaced(least: int, most: int, points: int) -> Iterator[int]:
    if least == most:
        yield least
        return
    for index in range(points - 1):
        yield round(least * (most / least) ** (index / (points - 1)))
    yield most


def _point(plan: Plan) -> CurvePoint:
    placement = plan.placement
    return CurvePoint(
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.prediction.peak_bytes,
        step_ns=plan.prediction.step_ns,
        lower_bound_ns=plan.prediction.lower_bound_ns,
        moved_bytes=plan.prediction.moved_bytes,
        placement={
            "weights": dict(Counter(region.weights for region in placement.regions)),
            "activations": dict(Counter(region.activations for region in placement.regions)),
            "optimizer_state": dict(Counter(placement.state.values())),
        },
        micro_batches=placement.micro_batches,
    )


def _carried(before: CurvePoint, point: CurvePoint) -> CurvePoint:
    """The plan of the smaller budget, under the larger one and its bound."""
    return CurvePoint(
        budget_bytes=point.budget_bytes,
        peak_bytes=before.peak_bytes,
        step_ns=before.step_ns,
        lower_bound_ns=point.lower_bound_ns,
        moved_bytes=before.moved_bytes,
        placement=before.placement,
        micro_batches=before.micro_batches,
        carried=True,
    )


def work(order: Order) -> None:
    order.save(run(order.config, order.load(RegionGraph), order.load(Costs)))


if __name__ == "__main__":
    stage_main("solve", work)
