"""Graph and costs in, plan and predicted timeline out."""

from __future__ import annotations

import time
from dataclasses import dataclass

from stages.artifacts.costs import Costs
from stages.artifacts.errors import ConfigError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan, Prediction
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig, parse_size
from stages.room import available_bytes
from stages.solve.build import build_problem
from stages.solve.homes import require_tiers
from stages.solve.micro_batches import cuts, fastest
from stages.solve.solvers import SOLVERS
from stages.solve.task import Solution, Task, margin_of
from stages.solve.verifier import verify


def run(
    config: RunConfig,
    graph: RegionGraph,
    costs: Costs,
    *,
    evaluation: tuple[RegionGraph, Costs] | None = None,
    layout: str = "packed",
) -> tuple[Plan, Timeline]:
    """Plans the training of `graph` inside `config.budget`.

    Args:
        evaluation: Graph and costs of the model in evaluation mode, with the same parameters; None:
            the plan has no phase "evaluate".
        layout: How slots are given; "tight" reuses them at once, for tests.

    Raises:
        InfeasibleBudgetError: The solver cannot plan that budget; carries the least one it can.
        ConfigError: No such solver, or a size that is none.
        ArtifactError: Graph and costs do not fit each other.
    """
    started_ns = time.monotonic_ns()
    if config.solver.name not in SOLVERS:
        names = ", ".join(SOLVERS)
        raise ConfigError(
            f"solver.name={config.solver.name} is unknown; expected one of {names}",
            key="solver.name",
            found=config.solver.name,
            expected=names,
        )
    tiers = tier_budgets(config, costs)
    of_evaluation = build_problem(*evaluation, tiers.host_bytes) if evaluation is not None else None
    ways = cuts(config, costs)
    tasks = [
        Task(
            problem=build_problem(
                graph, costs, tiers.host_bytes, micro_batches=count, order=order, train=config.train
            ),
            budget_bytes=parse_size(config.budget, "budget"),
            evaluation=of_evaluation,
            disk_budget_bytes=tiers.disk_bytes,
            layout=layout,
            time_limit_s=config.solver.time_limit_s / len(ways),
        )
        for count, order in ways
    ]
    for task in tasks:
        require_tiers(task.problem, task.limit_bytes, task.disk_budget_bytes)
    task, solution = fastest(tasks, SOLVERS[config.solver.name])
    plan = _plan(task, solution, costs.loss, time.monotonic_ns() - started_ns)
    verify(
        plan,
        graph,
        costs,
        evaluation=evaluation,
        disk_budget_bytes=tiers.disk_bytes,
        host_budget_bytes=tiers.host_bytes,
    )
    return plan, solution.simulation.timeline


#: of free host memory, in percent: the rest is for what else runs there
_HOST_SHARE = 85


@dataclass(frozen=True)
class TierBudgets:
    """Bytes that host memory (beside an accelerator) and the disk may hold; None: what there is."""

    host_bytes: int | None
    disk_bytes: int | None


def tier_budgets(config: RunConfig, costs: Costs | None = None) -> TierBudgets:
    """As configured, else what the hardware entry has, where plans are made for one; else, beside an
    accelerator, most of what this machine has free."""
    tiers, hardware = config.tiers, config.hardware
    host = parse_size(tiers.host_budget, "tiers.host_budget") if tiers.host_budget else None
    disk = parse_size(tiers.disk_budget, "tiers.disk_budget") if tiers.disk_budget else None
    if costs is not None and costs.device != "cpu" and costs.source == "measured" and host is None:
        host = available_bytes() * _HOST_SHARE // 100
    if not hardware.planned_for:
        return TierBudgets(host, disk)
    return TierBudgets(
        hardware.size("host_memory") if host is None else host,
        hardware.size("disk") if disk is None else disk,
    )


def _plan(task: Task, solution: Solution, loss: str, solve_ns: int) -> Plan:
    simulation, program, problem = solution.simulation, solution.program, task.problem
    return Plan(
        solver=solution.solver,
        budget_bytes=task.budget_bytes,
        device=problem.device,
        precision=problem.precision,
        implementation=problem.optimizer.implementation,
        placement=program.placement,
        buffers=program.buffers,
        phases=program.phases,
        arena_bytes=program.arena_bytes,
        disk_bytes=program.disk_bytes,
        baseline_bytes=problem.baseline_bytes,
        margin_bytes=margin_of(task.budget_bytes),
        prediction=Prediction(
            peak_bytes=simulation.peak_bytes,
            step_ns=simulation.step_ns,
            least_feasible_bytes=solution.least_feasible_bytes,
            # the bound is of one batch: what further ones move differs, and nothing bounds it yet
            lower_bound_ns=0 if problem.accumulates else solution.lower_bound_ns,
            moved_bytes=simulation.moved_bytes,
            binding=simulation.binding,
        ),
        solve_ns=solve_ns,
        loss=loss if problem.micro_batches > 1 else "",
        host_pool_bytes=program.host_pool_bytes,
        host_bytes=program.host_bytes,
        deferred=problem.defers_update,
        clips=problem.clips,
        accumulate=problem.accumulate,
    )
