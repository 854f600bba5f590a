"""A phase on an accelerator: instructions are issued into its queues, which wait for one another.

The thread of a lane goes on as soon as its job is issued. What a transfer gives up then is still being
copied, so it stays held until the compute lane has waited for that transfer, itself or by way of others:
from there on the allocator may give the memory away, because all that is issued later comes later.
That is also the moment at which the planner counts it as free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from stages.artifacts.plan import LANES, Instruction
from stages.device.interface import COMPUTE, Mark, Streams
from stages.runtime.lanes.lane_set import Timing

#: Ends a buffer's life; gives the storages that copies may still need.
Free = Callable[[int], Sequence[torch.UntypedStorage]]


class Issuing:
    """Carries out the instructions of one phase, once.

    Args:
        perform: Issues one instruction's work into the calling thread's queue.
        free: Called for each buffer in `frees` after that.
    """

    def __init__(
        self,
        streams: Streams,
        instructions: Sequence[Instruction],
        perform: Callable[[Instruction], None],
        free: Free,
    ) -> None:
        self._streams = streams
        self._instructions = instructions
        self._perform = perform
        self._free = free
        self._certain = certain_transfers(instructions)
        self._starts: list[Mark] = [None] * len(instructions)
        self._ends: list[Mark] = [None] * len(instructions)
        self._held: dict[int, list[torch.UntypedStorage]] = {}
        with streams.on(COMPUTE):
            self._begin = streams.mark()
        self._begin_ns = time.perf_counter_ns()

    def perform(self, instruction: Instruction) -> None:
        """Issues one instruction; its dependencies have been issued."""
        streams, identity = self._streams, instruction.id
        with streams.on(instruction.lane):
            for dependency in instruction.after:
                streams.wait(self._ends[dependency])
            for transfer in self._certain.get(identity, ()):
                streams.let_go(self._held.pop(transfer, []))
            self._starts[identity] = streams.mark()
            self._perform(instruction)
            given = [storage for buffer in instruction.frees for storage in self._free(buffer)]
            self._ends[identity] = streams.mark()
        if instruction.lane == COMPUTE:
            streams.let_go(given)
        else:
            self._held[identity] = given

    def finish(self) -> list[Timing]:
        """Waits for everything; when the device ran each instruction."""
        streams = self._streams
        with streams.on(COMPUTE):
            for mark in self._ends:
                streams.wait(mark)
        streams.settle()
        for given in self._held.values():
            streams.let_go(given)
        self._held.clear()
        return [
            Timing(
                item.id,
                item.lane,
                self._begin_ns + streams.between_ns(self._begin, start),
                self._begin_ns + streams.between_ns(self._begin, end),
            )
            for item, start, end in zip(self._instructions, self._starts, self._ends, strict=True)
        ]


def certain_transfers(instructions: Sequence[Instruction]) -> dict[int, list[int]]:
    """Compute instruction -> the transfers that have certainly finished when it starts, and had not
    when its predecessor did."""
    known: list[list[int]] = []
    in_lane: dict[str, list[int]] = {lane: [] for lane in LANES}
    counted = dict.fromkeys(LANES, 0)
    found: dict[int, list[int]] = {}
    for item in instructions:
        lane = in_lane[item.lane]
        before = _before(item, lane, instructions, in_lane, known)
        known.append(before)
        lane.append(item.id)
        if item.lane == COMPUTE:
            new: list[int] = []
            for other, count in zip(LANES, before, strict=True):
                if other != COMPUTE:
                    new += in_lane[other][counted[other] : count]
                    counted[other] = max(counted[other], count)
            if new:
                found[item.id] = new
    return found


def _before(
    item: Instruction,
    lane: Sequence[int],
    instructions: Sequence[Instruction],
    in_lane: dict[str, list[int]],
    known: Sequence[Sequence[int]],
) -> list[int]:
    """How many instructions of each lane have certainly finished when `item` starts."""
    result = [0] * len(LANES)
    for other in (*item.after, *lane[-1:]):
        result = [max(mine, its) for mine, its in zip(result, known[other], strict=True)]
        column = LANES.index(instructions[other].lane)
        # lanes are short lists of ascending ids
        result[column] = max(result[column], _rank(in_lane[LANES[column]], other) + 1)
    return result


def _rank(ids: Sequence[int], identity: int) -> int:
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if ids[middle] < identity else (low, middle)
    return low
