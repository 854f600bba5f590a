"""One direction of the disk tier, as the runtime uses it, to be timed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable
from functools import cached_property
from statistics import median
from threading import Event

from stages.region import memory

BLOCK_BYTES = 16 * 2**20
#: halves of the scratch file: one is read, the other written
HALF_BLOCKS = 6
SMALL_BYTES = 4096
_SMALL_TRANSFERS = 32
#: what the runtime copies at once where memory is not aligned
_BOUNCE_BYTES = 4 * 2**20

Transfer = Callable[[int, memoryview, int], int]


class Direction:
    """Repeats transfers of one kind over its half of the file.

    Args:
        transfer: `read_at` or `write_at`.
        buffer: BLOCK_BYTES of page-aligned memory.
    """

    def __init__(self, transfer: Transfer, descriptor: int, buffer: memoryview, first_block: int) -> None:
        self._transfer = transfer
        self._descriptor = descriptor
        self._buffer = buffer
        self._first_block = first_block

    def bytes_per_s(self, seconds: float) -> int:
        start = time.perf_counter()
        return self._repeat(lambda: time.perf_counter() - start >= seconds)

    def bytes_per_s_until(self, stop: Event) -> int:
        return self._repeat(stop.is_set)

    def _repeat(self, done: Callable[[], bool]) -> int:
        start = time.perf_counter()
        moved = 0
        while True:
            for offset in self._offsets():
                moved += whole(self._transfer, self._descriptor, self._buffer, offset)
                if done():
                    return max(1, int(moved / (time.perf_counter() - start)))

    def latency_ns(self) -> int:
        small = self._buffer[:SMALL_BYTES]
        first = self._first_block * BLOCK_BYTES
        stride = HALF_BLOCKS * BLOCK_BYTES // _SMALL_TRANSFERS // SMALL_BYTES * SMALL_BYTES
        times = []
        for index in range(_SMALL_TRANSFERS):
            start = time.perf_counter_ns()
            whole(self._transfer, self._descriptor, small, first + index * stride)
            times.append(time.perf_counter_ns() - start)
        return int(median(times))

    def scattered_block_ns(self) -> int:
        """Extra time per SMALL_BYTES of a transfer whose memory is not in the arena.

        With the page pool it is on small pages, where the arena's are huge. Without, what is read lands on
        pages mapped for it, which the kernel has to make first, and what is written lies anywhere and is
        copied to aligned memory in pieces.
        """
        extra = []
        for offset in self._offsets():
            start = time.perf_counter_ns()
            whole(self._transfer, self._descriptor, self._buffer, offset)
            straight = time.perf_counter_ns()
            self._scattered(offset)
            extra.append((time.perf_counter_ns() - straight) - (straight - start))
        return max(0, int(median(extra) * SMALL_BYTES / BLOCK_BYTES))

    def _scattered(self, offset: int) -> None:
        if memory.pool_path():
            whole(self._transfer, self._descriptor, self._small_pages, offset)
            return
        if self._transfer is read_at:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            with mmap.mmap(-1, BLOCK_BYTES, flags=private) as fresh:
                view = memoryview(fresh)
                whole(self._transfer, self._descriptor, view, offset)
                view.release()
            return
        bounce = self._buffer[:_BOUNCE_BYTES]
        target = ctypes.addressof(ctypes.c_ubyte.from_buffer(bounce))
        for start in range(_BOUNCE_BYTES, BLOCK_BYTES, _BOUNCE_BYTES):
            ctypes.memmove(target, target + start, _BOUNCE_BYTES)
            whole(self._transfer, self._descriptor, bounce, offset + start)
        # the piece that lies in the bounce itself: as much again
        ctypes.memmove(target, target + BLOCK_BYTES - _BOUNCE_BYTES, _BOUNCE_BYTES)
        whole(self._transfer, self._descriptor, bounce, offset)

    @cached_property
    def _small_pages(self) -> memoryview:
        view = memoryview(mmap.mmap(-1, BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        view[:] = self._buffer
        return view

    def _offsets(self) -> range:
        first = self._first_block * BLOCK_BYTES
        return range(first, first + HALF_BLOCKS * BLOCK_BYTES, BLOCK_BYTES)


def read_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def write_at(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [buffer], offset)


def whole(transfer: Transfer, descriptor: int, buffer: memoryview, offset: int) -> int:
    """Moves all of `buffer`, in as many calls as the kernel needs; returns its size."""
    done = 0
    while done < buffer.nbytes:
        moved = transfer(descriptor, buffer[done:], offset + done)
        moved -= moved % SMALL_BYTES  # a direct transfer can only go on from a block border
        if moved <= 0:
            raise OSError(errno.EIO, "the disk moved nothing")
        done += moved
    return done
