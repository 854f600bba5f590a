"""Offsets in one arena: buffers that are never on the device together may share bytes.

Policies:
    packed: large buffers first, each into the smallest gap that holds it; or in order of time, each
        as low as it goes or into the smallest gap; whichever needs least. Of very many buffers only in order
        of time, as low as they go.
    tight: in order of time, each as low as it goes, so that a freed slot is filled at once.

Offline dynamic storage allocation is NP-hard; best fit by decreasing size is the usual heuristic
(Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter

import msgspec
import numpy as np

from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Buffer
from stages.solve.lowering.draft import Residency
from stages.solve.problem import align

POLICIES = ("packed", "tight")

#: packing by size compares every buffer with every other one
_MOST_BY_SIZE = 6000


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
    moving, top = _pack_by_time(requests)
    if policy == "packed" and len(requests) <= _MOST_BY_SIZE and top > _most_at_once(requests):
        others = (_pack_by_time(requests, best_fit=True), _pack_by_size(requests))
        moving, top = min((moving, top), *others, key=itemgetter(1))
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
                stays[stay.buffer].append((base + stay.claimed, base + stay.freed))
            end = max(end, base + stay.freed + 1)
        base = end
    return [
        Request(buffer, align(max(1, buffers[buffer].bytes)), tuple(sorted(spans)))
        for buffer, spans in stays.items()
    ]


def _most_at_once(requests: Iterable[Request]) -> int:
    """Bytes that are on the device together: no layout takes less."""
    changes = [
        change
        for request in requests
        for first, last in request.stays
        for change in ((first, request.bytes), (last + 1, -request.bytes))
    ]
    return max(accumulate(size for _, size in sorted(changes)), default=0)


def _pack_by_time(requests: Iterable[Request], *, best_fit: bool = False) -> tuple[dict[int, int], int]:
    order = sorted(requests, key=lambda request: (request.stays, -request.bytes))
    return _pack(order, best_fit=best_fit, by_time=True)


def _pack_by_size(requests: Iterable[Request]) -> tuple[dict[int, int], int]:
    order = sorted(requests, key=lambda request: (-request.bytes, request.stays))
    return _pack(order, best_fit=True, by_time=False)


def _pack(order: Sequence[Request], *, best_fit: bool, by_time: bool) -> tuple[dict[int, int], int]:
    offsets: dict[int, int] = {}
    placed = _Placed(sum(len(request.stays) for request in order))
    top = 0
    for request in order:
        if by_time:
            placed.forget_before(request.stays[0][0])
        offset = _gap(*placed.beside(request), request.bytes, best_fit=best_fit)
        offsets[request.buffer] = offset
        top = max(top, offset + request.bytes)
        placed.add(request, offset)
    return offsets, top


class _Placed:
    """Stays of the buffers that have their offset, as columns."""

    def __init__(self, stays: int) -> None:
        self._count = 0
        self._crowded = 64
        self._columns = np.zeros((4, stays), np.int64)  # first, last, bottom, top

    def add(self, request: Request, offset: int) -> None:
        for first, last in request.stays:
            self._columns[:, self._count] = first, last, offset, offset + request.bytes
            self._count += 1

    def forget_before(self, moment: int) -> None:
        """Drops what has left for good, where it has become much: nothing asked for from now on meets it."""
        if self._count < self._crowded:
            return
        there = self._columns[:, : self._count]
        kept = there[:, there[1] >= moment]
        self._count = kept.shape[1]
        self._crowded = 2 * self._count + 64
        self._columns[:, : self._count] = kept

    def beside(self, request: Request) -> tuple[np.ndarray, np.ndarray]:
        """Bottoms and tops of what is on the device together with `request`, from low to high."""
        firsts, lasts, bottoms, tops = self._columns[:, : self._count]
        meets = np.zeros(self._count, bool)
        for first, last in request.stays:
            meets |= (firsts <= last) & (lasts >= first)
        order = bottoms[meets].argsort(kind="stable")
        return bottoms[meets][order], tops[meets][order]


def _gap(bottoms: np.ndarray, tops: np.ndarray, size: int, *, best_fit: bool) -> int:
    """The offset of the smallest hole between taken spans that holds `size`, else of their top."""
    if not len(bottoms):
        return 0
    below = np.concatenate(([0], np.maximum.accumulate(tops)))
    holes = bottoms - below[:-1]
    fitting = (holes >= size).nonzero()[0]
    if not len(fitting):
        return int(below[-1])
    chosen = fitting[holes[fitting].argmin()] if best_fit else fitting[0]
    return int(below[chosen])
