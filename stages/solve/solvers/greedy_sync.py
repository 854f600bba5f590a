"""Greedy with every transfer beside its use: nothing is fetched ahead."""

from __future__ import annotations

from stages.solve.least_budget import most_frugal, require_budget, settle
from stages.solve.solvers.greedy import search
from stages.solve.task import Solution, Task, realise


def solve(task: Task) -> Solution:
    """Plans `task`.

    Raises:
        InfeasibleBudgetError: Not even giving up everything fits.
    """
    frugal = realise(task, most_frugal(task.estimator))
    require_budget(task, "greedy_sync", frugal)
    return settle(task, "greedy_sync", [search(task, prefetches=(0,), slots=1)], frugal)
