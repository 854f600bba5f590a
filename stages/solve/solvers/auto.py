"""The fastest answer of all solvers by simulated time, improved by local search."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from stages.artifacts.errors import InfeasibleBudgetError
from stages.solve.deadline import Deadline
from stages.solve.least_budget import most_frugal, require_budget, settle
from stages.solve.milp.exhaustive import exhaust
from stages.solve.milp.polish import polish
from stages.solve.milp.search import NEAR, ModelSearch
from stages.solve.solvers import greedy_async, greedy_sync, layerwise, resident
from stages.solve.task import Candidate, Solution, Task, realise

Solver = Callable[[Task], Solution]

#: nearer than this, solvers that know no bound are not asked (none came so near by itself), nor once twice
#: the time limit is used up
_NEAR_ENOUGH = 0.1


def solve(task: Task) -> Solution:
    """Plans `task`; the solution carries the lower bound.

    Raises:
        InfeasibleBudgetError: Not even giving up everything fits.
    """
    deadline = Deadline(task.time_limit_s)
    frugal = realise(task, most_frugal(task.estimator))
    require_budget(task, "auto", frugal)
    search = ModelSearch(task)
    search.find_bound(deadline)
    for candidate in _candidates(task, search, deadline):
        search.take(candidate)
    search.take(frugal)
    best = search.best
    if best is not None:
        best = polish(task, best, deadline, bound_ns=int(search.bound_ns * (1 + NEAR)))
        best = exhaust(task, best, deadline)
    return settle(task, "auto", [best], frugal, lower_bound_ns=search.bound_ns)


def _candidates(task: Task, search: ModelSearch, deadline: Deadline) -> Iterator[Candidate]:
    """Whatever each solver finds, until the best is near the bound."""
    yield from _ask(task, resident.solve)
    if search.gap <= NEAR:
        return
    search.improve(deadline)
    search.sharpen_bound()
    for solve_by in (layerwise.solve, greedy_async.solve, greedy_sync.solve):
        late = search.best is not None and deadline.left_s < -task.time_limit_s
        if search.gap > _NEAR_ENOUGH and not late:
            yield from _ask(task, solve_by)


def _ask(task: Task, solve_by: Solver) -> Iterator[Candidate]:
    try:
        yield solve_by(task).candidate
    except InfeasibleBudgetError:
        return  # it needs more than the most frugal placement, which is among the candidates
