"""The moments of a step that estimates look at, and memory at each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import add


class Positions:
    """Forward of each region, then backward and update of each in reverse, then the update phase."""

    def __init__(self, regions: int) -> None:
        self.count = regions
        self.positions = 3 * regions + 1

    def begins(self, slot: int) -> int:
        return slot if slot < self.count else self.count + 2 * (slot - self.count)

    def ends(self, slot: int) -> int:
        """The last position of a slot: its update."""
        return min(slot if slot < self.count else self.begins(slot) + 1, self.positions - 2)

    def region_of(self, slot: int) -> int:
        return slot if slot < self.count else 2 * self.count - 1 - slot


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
