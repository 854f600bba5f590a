"""Greedy with transfers that start up to three regions ahead of their use, and its repair."""

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
    require_budget(task, "greedy_async", frugal)
    # near the least budget nothing fits that is ahead: the synchronous search looks there
    found = [search(task, prefetches=(1, 2, 3), slots=3), search(task, prefetches=(0,), slots=1)]
    return settle(task, "greedy_async", found, frugal)
