"""An accelerator emulated in host memory, so that all of a plan for one runs without one.

Operators run on the CPU at once. Copies go into queues: prompt ones run as they are issued, late ones
only when somebody waits for a mark behind them, which is as late as an accelerator may run them. A
missing wait then shows every time, and so does memory that is given away while a copy still needs it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stages.device.cpu import Cpu
from stages.device.interface import COMPUTE, Streams
from stages.region import memory


@dataclass
class EmulatedMark:
    """The point after the first `position` operations of a queue; passed_ns: when, once it has been."""

    lane: str
    position: int
    passed_ns: int = 0


@dataclass(frozen=True)
class _Operation:
    run: Callable[[], None]
    storages: tuple[int, ...]


class _Queue:
    def __init__(self) -> None:
        self.waiting: deque[_Operation] = deque()
        self.done = 0

    @property
    def issued(self) -> int:
        return self.done + len(self.waiting)


class EmulatedStreams:
    """See `stages.device.interface.Streams`.

    One lock serves all queues: whoever waits runs what it waits for, one operation at a time.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._lock = threading.RLock()
        self._queues: dict[str, _Queue] = {}
        self._current = threading.local()

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        before = self._lane
        self._current.lane = lane
        try:
            yield
        finally:
            self._current.lane = before

    @property
    def _lane(self) -> str:
        return getattr(self._current, "lane", COMPUTE)

    def mark(self) -> EmulatedMark:
        with self._lock:
            # the mark is an operation itself, so that it notes when it is passed
            mark = EmulatedMark(self._lane, self._queue(self._lane).issued + 1)
            self._issue(lambda: _pass(mark))
            return mark

    def wait(self, mark: EmulatedMark) -> None:
        self._issue(lambda: self.finish(mark))

    def finish(self, mark: EmulatedMark) -> None:
        with self._lock:
            queue = self._queue(mark.lane)
            while queue.done < mark.position:
                self._run_first(queue)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            self._issue(lambda: _copy(target, source), target, source)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        self._issue(lambda: _fill(target, byte), target)

    def let_go(self, storages: Sequence[torch.UntypedStorage]) -> None:
        with self._lock:
            given = {storage.data_ptr() for storage in storages if storage.nbytes()}
            for lane, queue in self._queues.items():
                for operation in queue.waiting:
                    if given.intersection(operation.storages):
                        raise RuntimeError(f"memory is given away while a copy on lane {lane} still needs it")

    def settle(self) -> None:
        with self._lock:
            for queue in self._queues.values():
                while queue.waiting:
                    self._run_first(queue)

    def between_ns(self, first: EmulatedMark, second: EmulatedMark) -> int:
        return second.passed_ns - first.passed_ns

    def _queue(self, lane: str) -> _Queue:
        return self._queues.setdefault(lane, _Queue())

    def _issue(self, run: Callable[[], None], *tensors: torch.Tensor) -> None:
        lane = self._lane
        storages = tuple(tensor.untyped_storage().data_ptr() for tensor in tensors)
        with self._lock:
            queue = self._queue(lane)
            queue.waiting.append(_Operation(run, storages))
            # operators run at once, so what has been issued before them must have run too
            if lane == COMPUTE or not self._late:
                while queue.waiting:
                    self._run_first(queue)

    def _run_first(self, queue: _Queue) -> None:
        operation = queue.waiting.popleft()
        operation.run()
        queue.done += 1


def _pass(mark: EmulatedMark) -> None:
    mark.passed_ns = time.perf_counter_ns()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _fill(target: torch.Tensor, byte: int) -> None:
    with torch.no_grad():
        target.fill_(byte)


class Emulated(Cpu):
    """See `stages.device.interface.Device`. Its memory is what the process holds beyond `begin`."""

    name = "emulated"
    beside_host = True

    def __init__(self) -> None:
        self._before_bytes = 0

    def streams(self, *, late: bool) -> Streams:
        return EmulatedStreams(late=late)

    def begin(self, budget_bytes: int) -> None:
        memory.trim()
        self._before_bytes = memory.resident_bytes()

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        return torch.UntypedStorage(size_bytes)

    def peak_bytes(self) -> int:
        return max(0, memory.peak_resident_bytes() - self._before_bytes)
