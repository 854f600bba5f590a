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

#: a bound that has been met but for its tolerance
_EXACT = 2e-6
#: regions -> share of the time limit that must be left for greedy search to end about in time
_GREEDY_TAKES = {30: 0.0, 60: 0.5}

#: where time is used up, solvers that know no bound are asked only if the best is farther from it than this
#: (none came so near by itself), and twice the time limit is not used up
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
    for candidate in _ask(task, resident.solve):
        search.take(candidate)
    if search.gap > NEAR:
        search.improve(deadline)
        search.sharpen_bound()
        search.take(frugal)
        _improve(task, search, deadline)
        known = search.best
        for candidate in _others(task, search, deadline):
            search.take(candidate)
        if search.best is not known:
            _improve(task, search, deadline)
    return settle(task, "auto", [search.best], frugal, lower_bound_ns=search.bound_ns)


def _improve(task: Task, search: ModelSearch, deadline: Deadline) -> None:
    """Local search from the best, in what time is left."""
    if search.best is not None:
        best = polish(task, search.best, deadline, bound_ns=int(search.bound_ns * (1 + NEAR)))
        search.take(exhaust(task, best, deadline))


def _others(task: Task, search: ModelSearch, deadline: Deadline) -> Iterator[Candidate]:
    """What solvers find that know no bound: where time is left, or the best is far from the bound."""
    regions = len(task.problem.regions)
    takes = next((share for most, share in _GREEDY_TAKES.items() if regions <= most), float("inf"))
    in_time = deadline.left_s > takes * task.time_limit_s
    for solve_by in (layerwise.solve, greedy_async.solve, greedy_sync.solve):
        late = search.best is not None and deadline.left_s < -task.time_limit_s
        far = search.gap > _NEAR_ENOUGH and not late
        # greedy_sync is greedy_async without what hides transfers
        near = in_time and search.gap > _EXACT and solve_by is not greedy_sync.solve
        if far or near:
            yield from _ask(task, solve_by)


def _ask(task: Task, solve_by: Solver) -> Iterator[Candidate]:
    try:
        yield solve_by(task).candidate
    except InfeasibleBudgetError:
        return  # it needs more than the most frugal placement, which is among the candidates
