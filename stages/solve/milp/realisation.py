"""Choices with as much room for transfers as the budget leaves."""

from __future__ import annotations

from stages.solve.choice import Choice
from stages.solve.milp.distances import with_distances
from stages.solve.problem import align
from stages.solve.solvers.task import Candidate, Task, realise

#: lowerings that a candidate may take until its slots fit
_ATTEMPTS = 6


def realise_full(task: Task, choice: Choice, arena_bytes: int) -> Candidate:
    """Lowers `choice` with the largest `moving_bytes` that fits; with the least where none does.

    Args:
        arena_bytes: What the arena should take; all else is for tensors outside it.
    """
    est = task.estimator
    memory = est.memory(choice)
    room = task.limit_bytes - task.fixed_bytes - memory.resident
    least = max(memory.dynamic)
    dynamic = min(max(least, task.limit_bytes - task.fixed_bytes - arena_bytes), max(least, room - 1))
    choice = with_distances(est, choice, dynamic)
    capacity = max(1, room - max(est.dynamic(choice)))
    for _ in range(_ATTEMPTS):
        trial = choice.copy()
        trial.moving_bytes = capacity
        candidate = realise(task, trial)
        if candidate.fits(task) or capacity == 1:
            break
        capacity = max(1, capacity - align(candidate.simulation.peak_bytes - task.limit_bytes))
    return candidate
