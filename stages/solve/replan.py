"""A plan for a run under way, whose first steps corrected the costs."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from stages.artifacts.costs import Costs
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan, Prediction
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig, TrainConfig
from stages.solve.build import build_problem
from stages.solve.lowering.lower import Program
from stages.solve.simulator import simulate
from stages.solve.stage import run, tier_budgets
from stages.solve.verifier import verify

#: a new plan must be predicted to be that much faster: corrected costs are measured, and so uncertain
LEAST_GAIN = 0.03


def run_again(
    config: RunConfig,
    graph: RegionGraph,
    costs: Costs,
    previous: Plan,
    *,
    evaluation: tuple[RegionGraph, Costs] | None = None,
) -> tuple[Plan, Timeline]:
    """The plan to go on with: a new one where it is worth it, else `previous` with a new prediction.

    Args:
        costs: Corrected.
        previous: Verified when it was made; it holds the present training state.

    Raises:
        InfeasibleBudgetError: No plan fits, and the previous one is predicted to exceed the budget.
    """
    tiers = tier_budgets(config, costs)
    kept, kept_timeline = predict_again(graph, costs, previous, evaluation)
    try:
        made, made_timeline = run(with_numbers_of(config, previous), graph, costs, evaluation=evaluation)
    except InfeasibleBudgetError as error:
        if kept.prediction.peak_bytes > kept.budget_bytes:
            raise
        print(f"solve: {error}. The present plan stays: it uses part of its margin", flush=True)
        return kept, kept_timeline
    kept = _with_bounds_of(kept, made)
    changes = config.solver.replan == "always" or is_better(made, kept)
    print(f"solve: {_describe(made, kept, changes=changes)}", flush=True)
    if changes:
        return made, made_timeline
    verify(
        kept,
        graph,
        costs,
        evaluation=evaluation,
        disk_budget_bytes=tiers.disk_bytes,
        host_budget_bytes=tiers.host_bytes,
    )
    return kept, kept_timeline


def with_numbers_of(config: RunConfig, plan: Plan) -> RunConfig:
    """`config` without the choices that would change losses: the batch stays cut as it is."""
    given = replace(config.solver, micro_batches="given")
    train = replace(config.train, micro_batches=plan.placement.micro_batches)
    return replace(config, solver=given, train=train)


def is_better(made: Plan, kept: Plan) -> bool:
    """Whether to go over from `kept` to `made`, both predicted with the same costs."""
    if kept.prediction.peak_bytes > kept.budget_bytes - kept.margin_bytes:
        return True
    return made.prediction.step_ns <= (1 - LEAST_GAIN) * kept.prediction.step_ns


def predict_again(
    graph: RegionGraph, costs: Costs, plan: Plan, evaluation: tuple[RegionGraph, Costs] | None = None
) -> tuple[Plan, Timeline]:
    """`plan` with what the simulator says of it under other costs."""
    placement = plan.placement
    problem = build_problem(
        graph,
        costs,
        micro_batches=placement.micro_batches,
        order=placement.micro_batch_order,
        train=TrainConfig(accumulate=plan.accumulate),
    )
    program = Program(
        plan.placement,
        plan.buffers,
        plan.phases,
        plan.arena_bytes,
        plan.disk_bytes,
        plan.host_pool_bytes,
        plan.host_bytes,
    )
    simulation = simulate(problem, program, build_problem(*evaluation) if evaluation is not None else None)
    prediction = Prediction(
        peak_bytes=simulation.peak_bytes,
        step_ns=simulation.step_ns,
        least_feasible_bytes=plan.prediction.least_feasible_bytes,
        moved_bytes=simulation.moved_bytes,
        binding=simulation.binding,
    )
    again = msgspec.structs.replace(plan, prediction=prediction, baseline_bytes=costs.baseline_bytes)
    return again, simulation.timeline


def _with_bounds_of(kept: Plan, made: Plan) -> Plan:
    """What was found of any plan under these costs: the least budget, the bound on step time."""
    own = kept.prediction
    prediction = msgspec.structs.replace(
        made.prediction,
        peak_bytes=own.peak_bytes,
        step_ns=own.step_ns,
        moved_bytes=own.moved_bytes,
        binding=own.binding,
    )
    return msgspec.structs.replace(kept, prediction=prediction)


def _describe(made: Plan, kept: Plan, *, changes: bool) -> str:
    old, new = (plan.prediction.step_ns / 1e9 for plan in (kept, made))
    what = "goes over to it" if changes else "the present plan stays"
    return f"with corrected costs, {old:.3f} s a step as it is and {new:.3f} s with a new plan: {what}"
