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

from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Buffer
from stages.solve.lowering.draft import Residency
from stages.solve.problem import align

POLICIES = ("packed", "tight")

#: program positions in one bucket of the index of placed buffers
_BUCKET = 32


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
    placed: dict[int, set[tuple[int, int, Request]]] = defaultdict(set)
    top = 0
    for number, request in enumerate(order):
        buckets = {bucket for span in request.stays for bucket in _buckets(span)}
        neighbours = set().union(*(placed[bucket] for bucket in buckets if bucket in placed))
        taken = sorted(
            (offset, offset + other.bytes)
            for offset, _, other in neighbours
            if _meet(request.stays, other.stays)
        )
        offset = _gap(taken, request.bytes, best_fit=best_fit)
        offsets[request.buffer] = offset
        top = max(top, offset + request.bytes)
        for bucket in buckets:
            placed[bucket].add((offset, number, request))
    return offsets, top


def _buckets(span: tuple[int, int]) -> range:
    return range(span[0] // _BUCKET, span[1] // _BUCKET + 1)


def _meet(left: tuple[tuple[int, int], ...], right: tuple[tuple[int, int], ...]) -> bool:
    return any(start <= end_ and start_ <= end for start, end in left for start_, end_ in right)


def _gap(taken: Sequence[tuple[int, int]], size: int, *, best_fit: bool) -> int:
    """The offset of the smallest hole between `taken` spans that holds `size`, else of their top."""
    cursor, best, best_size = 0, -1, 0
    for start, end in taken:
        hole = start - cursor
        if hole >= size and (best < 0 or hole < best_size):
            best, best_size = cursor, hole
            if not best_fit:
                break
        cursor = max(cursor, end)
    return cursor if best < 0 else best
