"""Local search: one choice changed at a time, lowered and simulated, kept where it is faster."""

from __future__ import annotations

from collections.abc import Iterator

from stages.solve.choice import Choice, chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.realisation import realise_spread, with_room
from stages.solve.task import Candidate, Task

#: how much of the room beside what must be there goes to slots, tried in turn
_SHARES = (0.5, 1.0, 0.0)


def polish(task: Task, best: Candidate, deadline: Deadline, *, bound_ns: int = 0) -> Candidate:
    """The best that single changes reach from `best` before `deadline`, or until one meets the bound."""
    improved = True
    while improved:
        improved = False
        for choice in neighbours(task, best.choice):
            if deadline.left_s <= 0 or best.simulation.step_ns <= bound_ns:
                return best
            found = fastest(task, choice)
            if found is not None and found.simulation.step_ns < best.simulation.step_ns:
                best, improved = found, True
    return best


def fastest(task: Task, choice: Choice) -> Candidate | None:
    """`choice` with the split of its room between slots and activations that makes it fastest; None
    where it does not fit."""
    memory = task.estimator.memory(choice)
    room = task.limit_bytes - task.fixed_bytes - memory.resident - max(memory.dynamic)
    if room < 0:
        return None
    moves = bool(choice.values) or "move" in choice.activations
    best: Candidate | None = None
    spread: list[Choice] = []
    for share in _SHARES if moves else (1.0,):
        trial = with_room(task, choice, memory.resident + int(share * room))
        if trial in spread:
            continue  # where little moves, they come to the same
        spread.append(trial)
        candidate = realise_spread(task, trial)
        if candidate.fits(task) and (best is None or candidate.simulation.step_ns < best.simulation.step_ns):
            best = candidate
    return best


def neighbours(task: Task, choice: Choice) -> Iterator[Choice]:
    """Choices that differ from `choice` in one thing."""
    yield from _chunks(task, choice)
    yield from _state(task, choice)
    yield from _activations(task, choice)
    yield from _values(task, choice)
    yield from _weights(task, choice)


def _chunks(task: Task, choice: Choice) -> Iterator[Choice]:
    for size in chunk_sizes(task.problem):
        if size in (choice.chunk_elements // 2, choice.chunk_elements * 2):
            changed = choice.copy()
            changed.chunk_elements = size
            yield changed
    for hold in (choice.hold + 2, choice.hold - 2):
        if 0 <= hold < task.problem.slots:
            changed = choice.copy()
            changed.hold = hold
            yield changed


def _state(task: Task, choice: Choice) -> Iterator[Choice]:
    for index, group in enumerate(task.estimator.states):
        changed = choice.copy()
        changed.state[index] = not choice.state[index]
        for name in group.parameters:
            changed.kept.pop(name, None)
        yield changed
        if any(name in choice.kept for name in group.parameters):
            whole = choice.copy()
            for name in group.parameters:
                whole.kept.pop(name, None)
            yield whole


def _activations(task: Task, choice: Choice) -> Iterator[Choice]:
    last = task.problem.last_backward
    for region in task.problem.regions:
        if region.backward and not region.checkpoint and region.index != last:
            for how in ("keep", "recompute", "move"):
                if how != choice.activations[region.index]:
                    changed = choice.copy()
                    changed.activations[region.index] = how
                    yield changed


def _values(task: Task, choice: Choice) -> Iterator[Choice]:
    for value in task.problem.values.values():
        if value.movable:
            changed = choice.copy()
            changed.values = choice.values ^ {value.name}
            yield changed


def _weights(task: Task, choice: Choice) -> Iterator[Choice]:
    groups = task.estimator.weights
    streamed = {
        index
        for index, group in enumerate(groups)
        if index not in choice.held and any(choice.weights[region] for region in group.regions)
    }
    for index in range(len(groups)):
        changed = choice.copy()
        chosen = streamed ^ {index}
        changed.weights = [False] * len(choice.weights)
        for other in chosen:
            for region in groups[other].regions:
                changed.weights[region] = True
        changed.held = frozenset(range(len(groups))) - chosen
        yield changed
