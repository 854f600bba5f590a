"""The mixed-integer program: its bound, its points rounded and lowered, and local search from the best."""

from __future__ import annotations

from stages.solve.deadline import Deadline
from stages.solve.least_budget import most_frugal, require_budget, settle
from stages.solve.milp.exhaustive import exhaust
from stages.solve.milp.polish import polish
from stages.solve.milp.search import NEAR, ModelSearch
from stages.solve.task import Solution, Task, realise


def solve(task: Task) -> Solution:
    """Plans `task` within its time limit; the bound is found first, whatever time it takes.

    Raises:
        InfeasibleBudgetError: Not even giving up everything fits.
    """
    deadline = Deadline(task.time_limit_s)
    frugal = realise(task, most_frugal(task.estimator))
    require_budget(task, "milp", frugal)
    search = ModelSearch(task)
    search.find_bound(deadline)
    search.improve(deadline)
    search.sharpen_bound()
    search.take(frugal)
    best = search.best
    if best is not None:
        best = polish(task, best, deadline, bound_ns=int(search.bound_ns * (1 + NEAR)))
        best = exhaust(task, best, deadline)
    return settle(task, "milp", [best], frugal, search.bound_ns)
