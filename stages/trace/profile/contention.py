"""What transfers and compute take from each other when they run at once.

On a CPU both use the same cores and the same memory. The model is linear, so that a planner can
state it as a constraint: while reading, compute runs at 1 - r of its speed, while writing at 1 - w,
while both at 1 - r - w. r and w are fitted to all three, by least squares.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from threading import Event
from typing import Protocol

import msgspec

from stages.artifacts.costs import LinkCost

#: compute keeps at least a tenth of its speed under both, whatever noise makes of a measurement
_MOST_SLOWDOWN = 0.45
_CASES = 3


class Repeated(Protocol):
    """Transfers one way, again and again; returns their bytes per second."""

    def bytes_per_s(self, seconds: float) -> int: ...

    def bytes_per_s_until(self, stop: Event) -> int: ...


@dataclass(frozen=True)
class _Beside:
    """Compute beside some transfers: share of its speed lost, and the bandwidth of each transfer."""

    lost: float
    bytes_per_s: list[int]


def with_contention(
    links: Sequence[LinkCost],
    directions: tuple[Repeated, Repeated],
    compute: Callable[[], object],
    seconds: float,
) -> list[LinkCost]:
    """`links` with the fields about compute filled in.

    Args:
        directions: Of the links, in their order.
        compute: Some work of the model, well shorter than `seconds`.
        seconds: About how long it all takes.
    """
    share = seconds / (2 * _CASES)
    alone = [_beside(compute, [direction], share) for direction in directions]
    both = _beside(compute, directions, share)
    lost = fitted(alone[0].lost, alone[1].lost, both.lost)
    return [
        msgspec.structs.replace(
            link,
            busy_bytes_per_s=min(link.bytes_per_s, single.bytes_per_s[0]),
            busy_contended_bytes_per_s=min(
                link.contended_bytes_per_s, single.bytes_per_s[0], both.bytes_per_s[index]
            ),
            compute_slowdown_ppm=round(lost[index] * 1e6),
        )
        for index, (link, single) in enumerate(zip(links, alone, strict=True))
    ]


def fitted(reading: float, writing: float, both: float) -> tuple[float, float]:
    """r and w that fit three measured losses of speed best: r, w and r + w."""
    error = (both - reading - writing) / 3
    return tuple(min(_MOST_SLOWDOWN, max(0.0, loss + error)) for loss in (reading, writing))  # type: ignore[return-value]


def _beside(compute: Callable[[], object], directions: Sequence[Repeated], seconds: float) -> _Beside:
    """Alone and disturbed in turn, so that a slow drift of the machine falls on both."""
    free_s = _typical_s(compute, seconds)
    stop = Event()
    with ThreadPoolExecutor(len(directions)) as pool:
        running = [pool.submit(direction.bytes_per_s_until, stop) for direction in directions]
        try:
            disturbed_s = _typical_s(compute, seconds)
        finally:
            stop.set()
        speeds = [future.result() for future in running]
    return _Beside(max(0.0, 1 - free_s / disturbed_s), speeds)


def _typical_s(work: Callable[[], object], seconds: float) -> float:
    """Median time of `work`, repeated for about `seconds`, at least twice."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)
