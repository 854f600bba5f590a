"""The moments of a step that estimates look at, and memory at each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add

from stages.solve.problem import Problem


class Positions:
    """The turns of a step, an update after each backward that completes gradients, then the update
    phase."""

    def __init__(self, problem: Problem) -> None:
        self.count = len(problem.regions)
        self._turns = problem.turns
        self._begins: list[int] = []
        self._ends: list[int] = []
        #: positions at which weights are updated inside backward
        self.updates: list[int] = []
        position = 0
        for turn in problem.turns:
            self._begins.append(position)
            if not turn.forward and turn.micro_batch == problem.last_micro_batch:
                position += 1
                self.updates.append(position)
            self._ends.append(position)
            position += 1
        self.positions = position + 1

    def begins(self, slot: int) -> int:
        return self._begins[slot]

    def ends(self, slot: int) -> int:
        """The last position of a slot: its update, where it has one. Slots after the last are the last."""
        return self._ends[min(slot, len(self._ends) - 1)]

    def distance_of(self, slot: int) -> int:
        """Which of `Problem.distances` says how early the fetches for a slot may start."""
        turn = self._turns[slot]
        return turn.region if turn.forward else 2 * self.count - 1 - turn.region


@dataclass(frozen=True)
class Memory:
    """Bytes: of what is resident in the arena and of the plan's records, and, per position, of what
    moves and what is dynamic."""

    resident: int
    planned: list[int]
    dynamic: list[int]

    @cached_property
    def peak_bytes(self) -> int:
        return self.resident + max(self.planned) + max(self.dynamic)

    @cached_property
    def moment_bytes(self) -> list[int]:
        """Planned and dynamic bytes at each position, without what is resident."""
        return list(map(add, self.planned, self.dynamic))

    @cached_property
    def worst_moment_bytes(self) -> int:
        return self.resident + max(self.moment_bytes)
