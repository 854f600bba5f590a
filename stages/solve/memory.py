"""The most memory that a program can hold, whatever its transfers' timing.

A buffer counts at a moment of the compute lane unless it has certainly been freed before, or is
certainly made after. Moments are the compute instructions and the gaps between them: moment 2k+1
is compute instruction k, moment 2k the gap before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stages.artifacts.plan import LANES, Buffer, Instruction, Phase


@dataclass(frozen=True)
class Peak:
    """Dynamic bytes and workspace at the worst moment of a phase."""

    bytes: int
    instruction: int  # id of the compute instruction at, or next after, the worst moment
    buffers: tuple[int, ...]  # dynamic buffers that count there, largest first


def clocks(phase: Phase) -> list[list[int]]:
    """Vector clocks: for each instruction, how many of each lane's have certainly finished before it
    starts (the order of `LANES`)."""
    lanes = {lane: position for position, lane in enumerate(LANES)}
    done = [0] * len(LANES)
    last: list[list[int]] = [[0] * len(LANES) for _ in LANES]
    rank: list[int] = []
    found: list[list[int]] = []
    for instruction in phase.instructions:
        lane = lanes[instruction.lane]
        clock = list(last[lane])
        for other in instruction.after:
            before, other_lane = found[other], lanes[phase.instructions[other].lane]
            for position, count in enumerate(before):
                clock[position] = max(clock[position], count)
            clock[other_lane] = max(clock[other_lane], rank[other] + 1)
        found.append(clock)
        rank.append(done[lane])
        done[lane] += 1
        after = list(clock)
        after[lane] = done[lane]
        last[lane] = after
    return found


class LiveRange:
    """Turns the instruction that makes or frees a buffer into moments of the compute lane."""

    def __init__(self, phase: Phase) -> None:
        self._clocks = clocks(phase)
        self._compute = [item.id for item in phase.instructions if item.lane == "compute"]
        self._rank = {identity: rank for rank, identity in enumerate(self._compute)}
        self._lane = [item.lane for item in phase.instructions]
        counts: dict[str, int] = dict.fromkeys(LANES, 0)
        self._lane_rank = []
        for lane in self._lane:
            self._lane_rank.append(counts[lane])
            counts[lane] += 1
        self._seen = {
            lane: [self._clocks[identity][position] for identity in self._compute]
            for position, lane in enumerate(LANES)
        }
        self.moments = 2 * len(self._compute) + 1

    def first_moment(self, maker: int) -> int:
        if maker < 0:
            return 0
        if self._lane[maker] == "compute":
            return 2 * self._rank[maker] + 1
        return 2 * self._clocks[maker][0]

    def last_moment(self, freer: int | None) -> int:
        if freer is None:
            return self.moments - 1
        if self._lane[freer] == "compute":
            return 2 * self._rank[freer] + 1
        # the first compute instruction that has certainly seen the freer finish
        return 2 * bisect_left(self._seen[self._lane[freer]], self._lane_rank[freer] + 1)

    def instruction_at(self, moment: int) -> int:
        return self._compute[min(moment // 2, len(self._compute) - 1)] if self._compute else -1


def stays_of(phase: Phase) -> list[tuple[int, int, int | None]]:
    """(buffer, maker or -1 for the entry, freer or None for the exit), from the instructions."""
    present = {item.buffer: -1 for item in phase.entry if item.tier == "device"}
    stays: list[tuple[int, int, int | None]] = []
    for instruction in phase.instructions:
        for access in instruction.writes:
            present.setdefault(access.buffer, instruction.id)
        for buffer in instruction.frees:
            stays.append((buffer, present.pop(buffer), instruction.id))
    return stays + [(buffer, maker, None) for buffer, maker in present.items()]


def dynamic_peak(phase: Phase, buffers: Sequence[Buffer]) -> Peak:
    """The worst moment of `phase` for memory outside the arena."""
    ranges = LiveRange(phase)
    change = [0] * (ranges.moments + 1)
    live: list[tuple[int, int, int]] = []
    for buffer, maker, freer in stays_of(phase):
        if buffers[buffer].offset is None:
            first, last = ranges.first_moment(maker), ranges.last_moment(freer)
            change[first] += buffers[buffer].bytes
            change[last + 1] -= buffers[buffer].bytes
            live.append((first, last, buffer))
    total = list(accumulate(change[:-1]))
    for rank, instruction in enumerate(_compute(phase)):
        total[2 * rank + 1] += instruction.workspace_bytes
    worst = max(range(len(total)), key=total.__getitem__)
    there = sorted(
        {buffer for first, last, buffer in live if first <= worst <= last},
        key=lambda buffer: -buffers[buffer].bytes,
    )
    return Peak(total[worst], ranges.instruction_at(worst), tuple(there))


def _compute(phase: Phase) -> list[Instruction]:
    return [instruction for instruction in phase.instructions if instruction.lane == "compute"]
