"""Choices with as much room for transfers as the budget leaves."""

from __future__ import annotations

from stages.solve.choice import CHUNK_SIZES, Choice
from stages.solve.estimate import Estimator
from stages.solve.milp.distances import with_distances
from stages.solve.problem import align
from stages.solve.task import Candidate, Task, realise

#: lowerings that a candidate may take until its slots fit
_ATTEMPTS = 5


def realise_full(task: Task, choice: Choice, arena_bytes: int) -> Candidate:
    """Lowers `choice` with the largest `moving_bytes` that fits; with the least where none does.

    Args:
        arena_bytes: What the arena should take; all else is for tensors outside it.
    """
    return realise_spread(task, with_room(task, choice, arena_bytes))


def with_room(task: Task, choice: Choice, arena_bytes: int) -> Choice:
    """`choice` with distances and `moving_bytes` that use all the room there is by the estimate."""
    est = task.estimator
    choice = _with_long_chunks(est, choice)
    memory = est.memory(choice)
    room = task.limit_bytes - task.fixed_bytes - memory.resident
    least = max(memory.dynamic)
    dynamic = min(max(least, task.limit_bytes - task.fixed_bytes - arena_bytes), max(least, room - 1))
    choice = with_distances(est, choice, dynamic)
    choice.moving_bytes = max(1, room - max(est.dynamic(choice)))
    return choice


def _with_long_chunks(est: Estimator, choice: Choice) -> Choice:
    """`choice` with the longest updates of what does not move whose workspace raises no peak."""
    highest = max(est.dynamic(choice))
    changed = choice.copy()
    for size in CHUNK_SIZES:
        changed.resident_chunk_elements = size
        if size <= choice.chunk_elements or max(est.dynamic(changed)) <= highest:
            break
    return changed


def realise_spread(task: Task, choice: Choice) -> Candidate:
    """Lowers `choice` with as much of its `moving_bytes` as fits."""
    candidate = realise(task, choice)
    for _ in range(_ATTEMPTS):
        if candidate.fits(task) or choice.moving_bytes == 1:
            break
        over = candidate.simulation.peak_bytes - task.limit_bytes
        choice = choice.copy()
        choice.moving_bytes = max(1, choice.moving_bytes - align(over))
        candidate = realise(task, choice)
    return candidate
