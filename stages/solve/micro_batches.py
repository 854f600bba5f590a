"""Into how many slices the step's batch is cut, and in which order they pass: what is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from stages.artifacts.costs import Costs
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.slicing import ORDERS, VERTICAL
from stages.config import RunConfig
from stages.solve.task import Solution, Task

#: number of slices and their order
Cut = tuple[int, str]


def cuts(config: RunConfig, costs: Costs) -> list[Cut]:
    """What may be chosen: the user's number in the order given or in both; with
    solver.micro_batches=auto every number that was measured, where slices make up the loss."""
    counts = [config.train.micro_batches]
    if config.solver.micro_batches == "auto":
        counts = [costs.micro_batches]
        if costs.loss:
            counts += [item.micro_batches for item in costs.slices]
    given = config.solver.micro_batch_order
    orders = ORDERS if given == "auto" else (given,)
    return [(count, order) for count in counts for order in (orders if count > 1 else (VERTICAL,))]


def fastest(tasks: Iterable[Task], solve: Callable[[Task], Solution]) -> tuple[Task, Solution]:
    """The task whose solution takes the least simulated time; of equals the first.

    Raises:
        InfeasibleBudgetError: None can be planned; that of the task which needs least.
    """
    solved: list[tuple[Task, Solution]] = []
    refusals: list[InfeasibleBudgetError] = []
    for task in tasks:
        try:
            solved.append((task, solve(task)))
        except InfeasibleBudgetError as error:
            refusals.append(error)
    if not solved:
        raise min(refusals, key=_needed)
    task, best = min(solved, key=lambda item: item[1].simulation.step_ns)
    # what none of the ways to cut can beat; 0 where one of them has no bound
    bound = min(solution.lower_bound_ns for _, solution in solved)
    return task, replace(best, lower_bound_ns=bound)


def _needed(error: InfeasibleBudgetError) -> float:
    return float("inf") if error.least_feasible_bytes is None else error.least_feasible_bytes
