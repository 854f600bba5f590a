"""Giving up, one thing at a time, what frees most memory for the time it costs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stages.solve.choice import Choice, chunk_sizes, everything_resident
from stages.solve.estimate import Estimator, Memory
from stages.solve.task import Candidate, Task, realise


@dataclass(frozen=True)
class Item:
    """Something that may be given up. `what` names it among all items; `how` is one way of doing so."""

    kind: str  # weights | state | recompute | move | value | gradients | chunk | slots
    target: int | str = 0
    prefetch: int = 0

    def apply(self, choice: Choice) -> Choice:
        """A copy of `choice` with this given up."""
        changed = choice.copy()
        match self.kind, self.target:
            case "weights", int(region):
                changed.weights[region] = True
                self._fetch_ahead(changed, region)
            case "state", int(group):
                changed.state[group] = True
            case "recompute", int(region):
                changed.activations[region] = "recompute"
            case "move", int(region):
                changed.activations[region] = "move"
                self._fetch_ahead(changed, region)
            case "value", str(name):
                changed.values = changed.values | {name}
            case "gradients", _:
                changed.gradients = "move"
            case "chunk", int(size):
                changed.chunk_elements = min(changed.chunk_elements, size)
            case "slots", int(slots):
                changed.chunk_slots = min(changed.chunk_slots, slots)
        return changed

    def _fetch_ahead(self, choice: Choice, region: int) -> None:
        """Both uses of the region's weights: forward and backward."""
        for slot in (region, len(choice.prefetch) - 1 - region):
            choice.prefetch[slot] = max(choice.prefetch[slot], self.prefetch)

    def revert(self, choice: Choice) -> Choice:
        """A copy of `choice` with this taken back."""
        changed = choice.copy()
        match self.kind, self.target:
            case "weights", int(region):
                changed.weights[region] = False
            case "state", int(group):
                changed.state[group] = False
            case (("recompute" | "move"), int(region)):
                changed.activations[region] = "keep"
            case "value", str(name):
                changed.values = changed.values - {name}
            case "gradients", _:
                changed.gradients = "keep"
        return changed

    def is_done(self, choice: Choice) -> bool:
        """Whether `choice` has this given up, in this way or another."""
        match self.kind, self.target:
            case "weights", int(region):
                return choice.weights[region]
            case "state", int(group):
                return choice.state[group]
            case (("recompute" | "move"), int(region)):
                return choice.activations[region] != "keep"
            case "value", str(name):
                return name in choice.values
            case "gradients", _:
                return choice.gradients != "keep"
            case "chunk", int(size):
                return choice.chunk_elements <= size
            case "slots", int(slots):
                return choice.chunk_slots <= slots
        return True


@dataclass(frozen=True, order=True)
class Profit:
    """Memory freed per time lost; `hidden` (no time lost) is beyond any ratio."""

    hidden: bool
    ratio: float
    freed: float


#: (negated profit, number, item)
Heap = list[tuple[tuple[float, float, float], int, Item]]


@dataclass(frozen=True)
class State:
    """A choice with what it is estimated to need and take."""

    choice: Choice
    memory: Memory
    step_ns: float


class Greedy:
    """One run of the algorithm under one memory target.

    Args:
        target_bytes: For the arena and everything dynamic; the process itself not counted.
        prefetches: Distances to try for each transfer (0: synchronous).
        slots: Update chunks on the device at once, to begin with.
    """

    def __init__(
        self, estimator: Estimator, target_bytes: int, prefetches: Sequence[int], slots: int
    ) -> None:
        self._estimator = estimator
        self._target = target_bytes
        self._prefetches = prefetches
        self._slots = slots

    def run(self, start: Choice | None = None) -> Choice | None:
        """A choice that is estimated to fit, or None.

        Args:
            start: What an earlier run under a higher target gave up; None: nothing yet.
        """
        state = self._state(start or self._start())
        heap = [
            (self._negated(self._profit(state, item)), number, item)
            for number, item in enumerate(self._items(state.choice))
        ]
        heapq.heapify(heap)
        while state.memory.peak_bytes > self._target:
            picked = self._pick(state, heap)
            if picked is None:
                return self._repair(state)
            item, profit = picked
            choice = item.apply(state.choice)
            for other in self._alike(item, int(self._over(state) / (4 * max(1.0, profit.freed))), heap):
                choice = other.apply(choice)
            state = self._state(choice)
        return (self._give_back(state) if start is None else state).choice

    def _start(self) -> Choice:
        choice = everything_resident(self._estimator.problem)
        choice.chunk_slots = self._slots
        sizes = chunk_sizes(self._estimator.problem)
        choice.chunk_elements = next((size for size in sizes if size <= 2**20), sizes[-1])
        return choice

    def _items(self, start: Choice) -> Iterator[Item]:
        problem = self._estimator.problem
        last = problem.last_backward
        for region in problem.regions:
            for prefetch in self._prefetches:
                if region.weights:
                    yield Item("weights", region.index, prefetch)
                if region.backward and region.index != last and not region.checkpoint:
                    yield Item("move", region.index, prefetch)
            if region.backward and region.index != last and not region.checkpoint:
                yield Item("recompute", region.index)
        yield from (Item("state", group) for group in range(len(self._estimator.states)))
        yield from (Item("value", value.name) for value in problem.values.values() if value.movable)
        if problem.defers_update:
            yield Item("gradients")
        sizes = chunk_sizes(problem)
        yield from (Item("chunk", size) for size in sizes if size < start.chunk_elements)
        yield from (Item("slots", slots) for slots in range(1, start.chunk_slots))

    def _state(self, choice: Choice) -> State:
        estimate = self._estimator.estimate(choice)
        return State(choice, estimate.memory, estimate.step_ns)

    def _excess(self, memory: Memory, slack: int) -> int:
        """Bytes over the target, summed over positions. `slack`: how much more the worst of the arena
        and the worst of the rest need together than they do at any one position."""
        allowed = self._target - slack - memory.resident
        return sum([here - allowed for here in memory.moment_bytes if here > allowed])

    def _profit(self, state: State, item: Item) -> Profit | None:
        if item.is_done(state.choice):
            return None
        trial = self._state(item.apply(state.choice))
        slack = state.memory.peak_bytes - state.memory.worst_moment_bytes
        freed = self._excess(state.memory, slack) - self._excess(trial.memory, slack)
        freed += state.memory.peak_bytes - trial.memory.peak_bytes
        if freed <= 0:
            return Profit(False, -1.0, freed)
        lost = trial.step_ns - state.step_ns
        return Profit(lost <= 0, freed / lost if lost > 0 else 0.0, freed)

    @staticmethod
    def _negated(profit: Profit | None) -> tuple[float, float, float]:
        if profit is None:
            return (2.0, 0.0, 0.0)
        return (-float(profit.hidden), -profit.ratio, -profit.freed)

    def _over(self, state: State) -> float:
        """What all that is still to be freed amounts to, counted as profits count it."""
        slack = state.memory.peak_bytes - state.memory.worst_moment_bytes
        return self._excess(state.memory, slack) + state.memory.peak_bytes - self._target

    @staticmethod
    def _alike(item: Item, count: int, heap: Heap) -> list[Item]:
        """Takes the next items off the heap while they are of the same sort: far from the target, one
        by one they would be picked next all the same, each after looking at all others again."""
        taken = []
        while len(taken) < count and heap and heap[0][2].kind == item.kind:
            if heap[0][2].prefetch != item.prefetch:
                break
            taken.append(heapq.heappop(heap)[2])
        return taken

    def _pick(self, state: State, heap: Heap) -> tuple[Item, Profit] | None:
        """The item of best profit. Profits change little from one pick to the next, so only the top
        is looked at again (lazy evaluation)."""
        useless = []
        picked = None
        while heap and picked is None:
            _, number, item = heapq.heappop(heap)
            profit = self._profit(state, item)
            if profit is None:
                continue
            entry = (self._negated(profit), number, item)
            if profit.freed <= 0:
                useless.append(entry)
            elif not heap or entry <= heap[0]:
                picked = item, profit
            else:
                heapq.heappush(heap, entry)
        for entry in useless:
            heapq.heappush(heap, entry)
        return picked

    def _repair(self, state: State) -> Choice | None:
        """Starts transfers later, best profit first, until the peak fits."""
        while state.memory.peak_bytes > self._target:
            best: tuple[tuple[float, float, float], State] | None = None
            for slot, distance in enumerate(state.choice.prefetch):
                if distance > 0:
                    choice = state.choice.copy()
                    choice.prefetch[slot] = distance - 1
                    trial = self._state(choice)
                    freed = state.memory.peak_bytes - trial.memory.peak_bytes
                    freed += sum(state.memory.planned) - sum(trial.memory.planned)
                    lost = trial.step_ns - state.step_ns
                    key = (float(lost <= 0), freed / lost if lost > 0 else freed, float(freed))
                    if freed > 0 and (best is None or key > best[0]):
                        best = (key, trial)
            if best is None:
                return None
            state = best[1]
        return state.choice

    def _give_back(self, state: State) -> State:
        """Takes back what was given up early and is no longer needed."""
        ways = {(item.kind, item.target): item for item in self._items(self._start())}
        for item in ways.values():
            if item.kind in ("chunk", "slots") or not item.is_done(state.choice):
                continue
            trial = self._state(item.revert(state.choice))
            if trial.memory.peak_bytes <= self._target and trial.step_ns <= state.step_ns:
                state = trial
        return state


def search(task: Task, prefetches: Sequence[int], slots: int) -> Candidate | None:
    """Runs the algorithm, lowers its answer, and where the estimate was off aims lower.

    Returns:
        A candidate that fits, or None.
    """
    # packing wastes about this much
    target = task.limit_bytes - task.fixed_bytes - task.limit_bytes // 1000
    choice = None
    for _ in range(8):
        choice = Greedy(task.estimator, target, prefetches, slots).run(choice)
        if choice is None:
            return None
        candidate = realise(task, choice)
        if candidate.fits(task):
            return candidate
        over = candidate.simulation.peak_bytes - task.limit_bytes
        target -= max(over, task.limit_bytes // 500)
    return None
