"""Peak memory of a piece of work, beyond what was there before.

The kernel's high-water mark sees all memory, also what operators allocate inside themselves. It is
exact when freed blocks leave the process at once (`memory.give_back_large_blocks`). Where the
mark cannot be reset, torch's allocator events are summed instead, which miss the operators' own
scratch memory. (A dispatch mode that counts storages would import the compiler: 74 MB.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd.profiler import profile

from stages.device.cpu import Cpu
from stages.device.interface import Device
from stages.region import memory

Result = TypeVar("Result")


class PeakGauge:
    """Measures peaks of pieces of work, and keeps the process's own over all resets of the mark."""

    def __init__(self, device: Device | None = None) -> None:
        self.device: Device = device or Cpu()
        self._largest_bytes = 0

    @property
    def process_peak_bytes(self) -> int:
        """Largest resident memory of this process since it began."""
        return max(self._largest_bytes, memory.peak_resident_bytes())

    def peak_of(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """Runs `work`; returns its result and the peak memory beyond what was there before, in bytes."""
        counted = self.device.peak_of(work)
        if counted is not None:
            return counted
        memory.trim()
        self._largest_bytes = self.process_peak_bytes
        if not memory.reset_peak():
            return peak_by_events(work)
        before = memory.resident_bytes()
        result = work()
        return result, max(0, memory.peak_resident_bytes() - before)


def peak_by_events(work: Callable[[], Result]) -> tuple[Result, int]:
    """The same from the allocator's events: each allocation positive, each release negative."""
    warnings.warn(
        "this process may not reset its memory high-water mark (/proc/self/clear_refs): memory that "
        "operators allocate inside themselves is not in the measured peaks",
        stacklevel=3,
    )
    recorder = profile(profile_memory=True)
    with recorder:
        result = work()
    results: Any = recorder.kineto_results  # a class of the C++ library, whose stub is incomplete
    events = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    live = peak = 0
    for _, change in sorted(events, key=lambda event: event[0]):
        live += change
        peak = max(peak, live)
    return result, peak
