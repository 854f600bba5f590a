"""Nothing moves: everything is on the device from the first step to the last."""

from __future__ import annotations

from stages.solve.choice import everything_resident
from stages.solve.least_budget import require_budget, settle, with_frugal_chunks
from stages.solve.task import Solution, Task, realise


def solve(task: Task) -> Solution:
    """Plans `task` without any transfer.

    Raises:
        InfeasibleBudgetError: The model does not fit whole.
    """
    candidate = realise(task, with_frugal_chunks(task.estimator, everything_resident(task.problem)))
    require_budget(task, "resident", candidate)
    return settle(task, "resident", [], candidate)
