"""Latency and bandwidth of the disk tier, each direction alone and both at once.

As the runtime does: O_DIRECT where the filesystem has it, 16 MiB blocks, one thread per direction.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from stages.artifacts.costs import LinkCost
from stages.artifacts.errors import StorageError
from stages.region import memory
from stages.trace.profile.contention import Repeated, with_contention
from stages.trace.profile.transfers import (
    BLOCK_BYTES,
    HALF_BLOCKS,
    SMALL_BYTES,
    Direction,
    read_at,
    whole,
    write_at,
)


def measure_links(
    folder: Path, *, seconds: float, compute: Callable[[], object] | None = None
) -> list[LinkCost]:
    """Measures on a scratch file of 192 MiB in `folder`, which is nameless and so leaves nothing.

    Args:
        folder: An existing folder on the filesystem of the disk tier.
        seconds: About how long all measurements take together.
        compute: Work of the model that is repeated beside transfers, to see what each takes from the
            other; None leaves that unmeasured.

    Raises:
        StorageError: The folder cannot hold the file.
    """
    try:
        descriptor = _open_scratch(folder)
        try:
            return _measure(descriptor, seconds, compute)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(
            f"cannot measure the disk at {folder}: {error.strerror or error}. Free "
            f"{2 * HALF_BLOCKS * BLOCK_BYTES} bytes there, or give another folder as tiers.disk",
            key="tiers.disk",
            found=errno.errorcode.get(error.errno or 0, str(error)),
            expected=f"{2 * HALF_BLOCKS * BLOCK_BYTES} writable bytes",
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


def _measure(descriptor: int, seconds: float, compute: Callable[[], object] | None) -> list[LinkCost]:
    buffers = [memoryview(memory.huge_mapping(2 * BLOCK_BYTES))[:BLOCK_BYTES] for _ in range(2)]
    for buffer in buffers:
        buffer[:] = os.urandom(SMALL_BYTES) * (BLOCK_BYTES // SMALL_BYTES)
    # written whole first: reading blocks that were never written touches no disk
    for block in range(2 * HALF_BLOCKS):
        whole(write_at, descriptor, buffers[0], block * BLOCK_BYTES)
    reader = Direction(read_at, descriptor, buffers[0], first_block=0)
    writer = Direction(write_at, descriptor, buffers[1], first_block=HALF_BLOCKS)
    share = seconds / (4 if compute is None else 10)
    alone = [direction.bytes_per_s(share) for direction in (reader, writer)]
    both = together([reader, writer], share)
    links = [
        LinkCost(
            name=name,
            latency_ns=direction.latency_ns(),
            bytes_per_s=single,
            # noise must not make a shared disk faster than a free one
            contended_bytes_per_s=min(single, shared),
            scattered_block_ns=direction.scattered_block_ns(),
        )
        for name, direction, single, shared in zip(
            ("disk_read", "disk_write"), (reader, writer), alone, both, strict=True
        )
    ]
    if compute is None:
        return links
    return with_contention(links, (reader, writer), compute, seconds * 0.6)


def together(directions: Sequence[Repeated], seconds: float) -> list[int]:
    barrier = Barrier(len(directions))

    def run(direction: Repeated) -> int:
        barrier.wait()
        return direction.bytes_per_s(seconds)

    with ThreadPoolExecutor(len(directions)) as pool:
        return list(pool.map(run, directions))
