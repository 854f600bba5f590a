"""Offsets in one arena: buffers that are never on the device together may share bytes.

Policies:
    packed: large buffers first, each into the smallest gap that holds it; or in order of time, each
        as low as it goes; whichever needs less.
    tight: in order of time, each as low as it goes, so that a freed slot is filled at once.

Offline dynamic storage allocation is NP-hard; best fit by decreasing size is the usual heuristic
(Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Buffer
from stages.solve.lowering.draft import Residency
from stages.solve.problem import align

POLICIES = ("packed", "tight")


@dataclass(frozen=True)
class Request:
    """A buffer to place. `stays` are closed spans of positions in the program."""

    buffer: int
    bytes: int
    stays: tuple[tuple[int, int], ...]


def lay_out(
    buffers: Sequence[Buffer], residencies: Sequence[Iterable[Residency]], policy: str
) -> tuple[dict[int, int], int]:
    """Gives every planned buffer an offset.

    Args:
        residencies: Of each phase, in program order; phases follow one another.

    Returns:
        Offset by buffer id, and the arena's bytes.

    Raises:
        ConfigError: No such policy.
    """
    if policy not in POLICIES:
        raise ConfigError(
            f"layout={policy} is unknown; expected one of {', '.join(POLICIES)}", key="solver.layout"
        )
    offsets: dict[int, int] = {}
    bottom = 0
    for buffer in buffers:
        if buffer.offset is not None and buffer.resident:
            offsets[buffer.id] = bottom
            bottom += align(buffer.bytes)
    requests = _requests(buffers, residencies)
    orders = [sorted(requests, key=lambda request: (request.stays, -request.bytes))]
    if policy == "packed":
        orders.append(sorted(requests, key=lambda request: (-request.bytes, request.stays)))
    packed = [_pack(order, best_fit=position > 0) for position, order in enumerate(orders)]
    moving, top = min(packed, key=lambda result: result[1])
    offsets.update({buffer: bottom + offset for buffer, offset in moving.items()})
    return offsets, bottom + top


def place(buffers: Sequence[Buffer], offsets: dict[int, int]) -> list[Buffer]:
    """`buffers` with their offsets."""
    return [
        buffer if buffer.offset is None else msgspec.structs.replace(buffer, offset=offsets.get(buffer.id, 0))
        for buffer in buffers
    ]


def _requests(buffers: Sequence[Buffer], residencies: Sequence[Iterable[Residency]]) -> list[Request]:
    stays: dict[int, list[tuple[int, int]]] = defaultdict(list)
    base = 0
    for phase in residencies:
        end = base
        for stay in phase:
            if buffers[stay.buffer].offset is not None:
                stays[stay.buffer].append((base + stay.made, base + stay.freed))
            end = max(end, base + stay.freed + 1)
        base = end
    return [
        Request(buffer, align(max(1, buffers[buffer].bytes)), tuple(sorted(spans)))
        for buffer, spans in stays.items()
    ]


def _pack(order: Sequence[Request], *, best_fit: bool) -> tuple[dict[int, int], int]:
    offsets: dict[int, int] = {}
    placed = _Placed(sum(len(request.stays) for request in order))
    top = 0
    for request in order:
        offset = _gap(*placed.beside(request), request.bytes, best_fit=best_fit)
        offsets[request.buffer] = offset
        top = max(top, offset + request.bytes)
        placed.add(request, offset)
    return offsets, top


class _Placed:
    """Stays of the buffers that have their offset, as columns."""

    def __init__(self, stays: int) -> None:
        self._count = 0
        self._first, self._last = np.zeros(stays, np.int64), np.zeros(stays, np.int64)
        self._bottom, self._top = np.zeros(stays, np.int64), np.zeros(stays, np.int64)

    def add(self, request: Request, offset: int) -> None:
        for first, last in request.stays:
            self._first[self._count], self._last[self._count] = first, last
            self._bottom[self._count], self._top[self._count] = offset, offset + request.bytes
            self._count += 1

    def beside(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Bottoms and tops of what is on the device together with `request`, from low to high."""
        firsts, lasts = self._first[: self._count], self._last[: self._count]
        meets = np.zeros(self._count, bool)
        for first, last in request.stays:
            meets |= (firsts <= last) & (lasts >= first)
        bottoms, tops = self._bottom[: self._count][meets], self._top[: self._count][meets]
        order = np.argsort(bottoms, kind="stable")
        return bottoms[order], tops[order]


def _gap(bottoms: np.ndarray, tops: np.ndarray, size: int, *, best_fit: bool) -> int:
    """The offset of the smallest hole between taken spans that holds `size`, else of their top."""
    if not len(bottoms):
        return 0
    below = np.concatenate(([0], np.maximum.accumulate(tops)))
    holes = bottoms - below[:-1]
    fitting = np.flatnonzero(holes >= size)
    if not len(fitting):
        return int(below[-1])
    chosen = fitting[np.argmin(holes[fitting])] if best_fit else fitting[0]
    return int(below[chosen])
