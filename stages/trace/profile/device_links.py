"""Latency and bandwidth between an accelerator and pinned host memory, each direction alone, both, and
beside the model's own work."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from threading import Event

import torch

from stages.artifacts.costs import LinkCost
from stages.device.interface import Device, Streams
from stages.trace.profile.contention import with_contention
from stages.trace.profile.links import together

_COPY_BYTES = 32 * 2**20
_SMALL_BYTES = 4096
_SMALL_COPIES = 32


class Copies:
    """Repeats copies one way, in a queue of their own.

    Args:
        lane: "read" (host to device) | "write" (back).
    """

    def __init__(self, lane: str, device: Device, streams: Streams) -> None:
        on_device = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device.target)
        on_host = torch.zeros(_COPY_BYTES, dtype=torch.uint8, pin_memory=device.target.type == "cuda")
        self._lane, self._streams = lane, streams
        self._ends = (on_device, on_host) if lane == "read" else (on_host, on_device)
        self._copy(_COPY_BYTES)

    def bytes_per_s(self, seconds: float) -> int:
        start = time.perf_counter()
        return self._repeat(lambda: time.perf_counter() - start >= seconds)

    def bytes_per_s_until(self, stop: Event) -> int:
        return self._repeat(stop.is_set)

    def latency_ns(self) -> int:
        times = []
        for _ in range(_SMALL_COPIES):
            start = time.perf_counter_ns()
            self._copy(_SMALL_BYTES)
            times.append(time.perf_counter_ns() - start)
        return int(median(times))

    def _repeat(self, done: Callable[[], bool]) -> int:
        start, moved = time.perf_counter(), 0
        while True:
            self._copy(_COPY_BYTES)
            moved += _COPY_BYTES
            if done():
                return max(1, int(moved / (time.perf_counter() - start)))

    def _copy(self, size_bytes: int) -> None:
        target, source = self._ends
        with self._streams.on(self._lane):
            self._streams.copy(target[:size_bytes], source[:size_bytes])
            self._streams.finish(self._streams.mark())


def measure_device_links(device: Device, *, seconds: float, compute: Callable[[], object]) -> list[LinkCost]:
    """The links "upload" and "download".

    Args:
        seconds: About how long it takes.
        compute: Work of the model that is repeated beside copies.
    """
    streams = device.streams(late=False)
    assert streams is not None, "links to host memory are measured beside an accelerator"
    directions = (Copies("read", device, streams), Copies("write", device, streams))
    share = seconds / 10
    alone = [direction.bytes_per_s(share) for direction in directions]
    both = together(directions, share)
    links = [
        LinkCost(name, direction.latency_ns(), single, min(single, shared))
        for name, direction, single, shared in zip(
            ("upload", "download"), directions, alone, both, strict=True
        )
    ]
    return with_contention(links, directions, compute, seconds * 0.6)
