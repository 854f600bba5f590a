"""Latency and bandwidth of the disk tier, each direction alone and both at once.

As the runtime does: O_DIRECT where the filesystem has it, 16 MiB blocks, one thread per direction.
"""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from threading import Barrier

from stages.artifacts.costs import LinkCost
from stages.artifacts.errors import StorageError

BLOCK_BYTES = 16 * 2**20
#: halves of the scratch file: one is read, the other written
_HALF_BLOCKS = 6
_SMALL_BYTES = 4096
_SMALL_TRANSFERS = 32

Transfer = Callable[[int, memoryview, int], int]


def measure_links(folder: Path, *, seconds: float) -> list[LinkCost]:
    """Measures on a scratch file of 192 MiB in `folder`, which is nameless and so leaves nothing.

    Args:
        folder: An existing folder on the filesystem of the disk tier.
        seconds: About how long all measurements take together.

    Raises:
        StorageError: The folder cannot hold the file.
    """
    try:
        descriptor = _open_scratch(folder)
        try:
            return _measure(descriptor, seconds / 4)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"cannot measure the disk at {folder}: {error.strerror or error}. Free "
            f"{2 * _HALF_BLOCKS * BLOCK_BYTES} bytes there, or give another folder as tiers.disk",
            key="tiers.disk",
            found=errno.errorcode.get(error.errno or 0, str(error)),
            expected=f"{2 * _HALF_BLOCKS * BLOCK_BYTES} writable bytes",
        ) from error


def _open_scratch(folder: Path) -> int:
    """A file without a name. Not O_TMPFILE, which some filesystems lack."""
    path = folder / f"profile.{os.getpid()}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # it may be made before O_DIRECT is refused
        descriptor = os.open(path, flags, 0o600)
    path.unlink()
    return descriptor


def _measure(descriptor: int, seconds: float) -> list[LinkCost]:
    buffers = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(2)]
    for buffer in buffers:
        buffer[:] = os.urandom(_SMALL_BYTES) * (BLOCK_BYTES // _SMALL_BYTES)
    # written whole first: reading blocks that were never written touches no disk
    for block in range(2 * _HALF_BLOCKS):
        _whole(_write, descriptor, buffers[0], block * BLOCK_BYTES)
    reader = _Direction(_read, descriptor, buffers[0], first_block=0)
    writer = _Direction(_write, descriptor, buffers[1], first_block=_HALF_BLOCKS)
    alone = [direction.bytes_per_s(seconds) for direction in (reader, writer)]
    together = _together([reader, writer], seconds)
    return [
        LinkCost(
            name=name,
            latency_ns=direction.latency_ns(),
            bytes_per_s=single,
            # noise must not make a shared disk faster than a free one
            contended_bytes_per_s=min(single, shared),
        )
        for name, direction, single, shared in zip(
            ("disk_read", "disk_write"), (reader, writer), alone, together, strict=True
        )
    ]


class _Direction:
    """Repeats transfers of one kind over its half of the file."""

    def __init__(self, transfer: Transfer, descriptor: int, buffer: memoryview, first_block: int) -> None:
        self._transfer = transfer
        self._descriptor = descriptor
        self._buffer = buffer
        self._first_block = first_block

    def bytes_per_s(self, seconds: float) -> int:
        start = time.perf_counter()
        moved = 0
        while True:
            for block in range(self._first_block, self._first_block + _HALF_BLOCKS):
                moved += _whole(self._transfer, self._descriptor, self._buffer, block * BLOCK_BYTES)
                elapsed = time.perf_counter() - start
                if elapsed >= seconds:
                    return max(1, int(moved / elapsed))

    def latency_ns(self) -> int:
        small = self._buffer[:_SMALL_BYTES]
        first = self._first_block * BLOCK_BYTES
        stride = _HALF_BLOCKS * BLOCK_BYTES // _SMALL_TRANSFERS // _SMALL_BYTES * _SMALL_BYTES
        times = []
        for index in range(_SMALL_TRANSFERS):
            start = time.perf_counter_ns()
            _whole(self._transfer, self._descriptor, small, first + index * stride)
            times.append(time.perf_counter_ns() - start)
        return int(median(times))


def _together(directions: list[_Direction], seconds: float) -> list[int]:
    barrier = Barrier(len(directions))

    def run(direction: _Direction) -> int:
        barrier.wait()
        return direction.bytes_per_s(seconds)

    with ThreadPoolExecutor(len(directions)) as pool:
        return list(pool.map(run, directions))


def _read(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [buffer], offset)


def _write(descriptor: int, buffer: memoryview, offset: int) -> int:
    return os.pwritev(descriptor, [buffer], offset)


def _whole(transfer: Transfer, descriptor: int, buffer: memoryview, offset: int) -> int:
    """Moves all of `buffer`, in as many calls as the kernel needs; returns its size."""
    done = 0
    while done < buffer.nbytes:
        moved = transfer(descriptor, buffer[done:], offset + done)
        moved -= moved % _SMALL_BYTES  # a direct transfer can only go on from a block border
        if moved <= 0:
            raise OSError(errno.EIO, "the disk moved nothing")
        done += moved
    return done
