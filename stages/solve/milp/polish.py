"""Local search: one choice changed at a time, lowered and simulated, kept where it is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle

from stages.solve.choice import Choice, chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.realisation import realise_spread, with_room
from stages.solve.task import Candidate, Task

#: the choice with one thing changed; None where there is nothing to change
Change = Callable[[Choice], Choice | None]

#: how much of the room beside what must be there goes to slots, tried in turn
_SHARES = (0.5, 1.0, 0.0)


def polish(task: Task, best: Candidate, deadline: Deadline, *, bound_ns: int = 0) -> Candidate:
    """The best that single changes reach from `best` before `deadline`, or until one meets the bound."""
    changes = [change for kind in _KINDS for change in kind(task)]
    untried = len(changes)
    for change in cycle(changes):
        if not untried or deadline.left_s <= 0 or best.simulation.step_ns <= bound_ns:
            break
        untried -= 1
        choice = change(best.choice)
        found = None if choice is None else fastest(task, choice)
        if found is not None and found.simulation.step_ns < best.simulation.step_ns:
            best, untried = found, len(changes)
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


def _chunks(task: Task) -> Iterator[Change]:
    def resized(choice: Choice, factor: float) -> Choice | None:
        changed = choice.copy()
        changed.chunk_elements = int(choice.chunk_elements * factor)
        sizes = chunk_sizes(task.problem, task.estimator.moving_elements(choice))
        return changed if changed.chunk_elements in sizes else None

    def held(choice: Choice, slots: int) -> Choice | None:
        changed = choice.copy()
        changed.hold += slots
        return changed if 0 <= changed.hold < task.problem.slots else None

    for factor in (0.5, 2.0):
        yield partial(resized, factor=factor)
    for slots in (2, -2):
        yield partial(held, slots=slots)


def _state(task: Task) -> Iterator[Change]:
    def flipped(choice: Choice, index: int) -> Choice:
        changed = choice.copy()
        changed.state[index] = not choice.state[index]
        for name in task.estimator.states[index].parameters:
            changed.kept.pop(name, None)
        return changed

    def whole(choice: Choice, index: int) -> Choice | None:
        names = task.estimator.states[index].parameters
        changed = choice.copy()
        changed.kept = {name: count for name, count in choice.kept.items() if name not in names}
        return changed if len(changed.kept) < len(choice.kept) else None

    for index in range(len(task.estimator.states)):
        yield partial(flipped, index=index)
        yield partial(whole, index=index)


def _activations(task: Task) -> Iterator[Change]:
    def treated(choice: Choice, region: int, how: str) -> Choice | None:
        changed = choice.copy()
        changed.activations[region] = how
        return changed if choice.activations[region] != how else None

    last = task.problem.last_backward
    for region in task.problem.regions:
        if region.backward and not region.checkpoint and region.index != last:
            for how in ("keep", "recompute", "move"):
                yield partial(treated, region=region.index, how=how)


def _values(task: Task) -> Iterator[Change]:
    def flipped(choice: Choice, name: str) -> Choice:
        changed = choice.copy()
        changed.values = choice.values ^ {name}
        return changed

    for value in task.problem.values.values():
        if value.movable:
            yield partial(flipped, name=value.name)


def _weights(task: Task) -> Iterator[Change]:
    groups = task.estimator.weights

    def flipped(choice: Choice, index: int) -> Choice:
        streamed = {
            other
            for other, group in enumerate(groups)
            if other not in choice.held and any(choice.weights[region] for region in group.regions)
        }
        changed = choice.copy()
        chosen = streamed ^ {index}
        changed.weights = [False] * len(choice.weights)
        for other in chosen:
            for region in groups[other].regions:
                changed.weights[region] = True
        changed.held = frozenset(range(len(groups))) - chosen
        return changed

    for index in range(len(groups)):
        yield partial(flipped, index=index)


#: kinds of single changes, in the order in which they are tried
_KINDS = (_chunks, _activations, _state, _values, _weights)
