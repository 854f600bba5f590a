"""A solver for tests that uses whatever a placement can say of transfers: reading ahead by capacity, weights
that wait for their next use, single weights and parts of optimizer states that stay."""

from __future__ import annotations

from stages.artifacts.plan import ALIGNMENT
from stages.solve.least_budget import most_frugal
from stages.solve.problem import PlannedParameter, align
from stages.solve.task import Solution, Task, budget_for, realise

#: small, so that every weight of a small model takes several chunks
CHUNK_ELEMENTS = 2 * ALIGNMENT


def solve(task: Task) -> Solution:
    """Everything moves, but every third weight and half of each state; half of what moves fits at once."""
    choice = most_frugal(task.estimator)
    choice.chunk_elements, choice.hold = CHUNK_ELEMENTS, 2
    choice.held = frozenset(range(0, len(task.estimator.weights), 3))
    if task.problem.optimizer.chunkable:
        choice.kept = {
            parameter.name: kept for parameter in task.problem.updated if (kept := _half_of(parameter))
        }
    groups = enumerate(task.estimator.weights)
    moving = sum(align(group.bytes) for index, group in groups if index not in choice.held)
    choice.moving_bytes = max(1, moving // 2)
    candidate = realise(task, choice)
    return Solution("reading_ahead", candidate, budget_for(candidate.simulation.peak_bytes))


def _half_of(parameter: PlannedParameter) -> int:
    """Elements that stay: at a border that the disk allows, and never all of them."""
    return parameter.elements // 2 // ALIGNMENT * ALIGNMENT
