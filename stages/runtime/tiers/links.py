"""From an accelerator to where its buffers wait: host memory, and through it the disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch

from stages.artifacts.plan import BOUNCE_BYTES
from stages.device.interface import Mark, Streams
from stages.runtime.tiers.disk import DiskFile
from stages.runtime.tiers.host import HostPool
from stages.runtime.tiers.memoryviews import Bytes

#: of a bounce buffer's blocks: two for each direction, so that one fills while the other empties
BLOCK_BYTES = BOUNCE_BYTES // 4
_BLOCKS = 2


class Home(Protocol):
    """Where buffers wait, by byte offset: a scratch file or host memory."""

    def read_into(self, buffer: Bytes, offset: int) -> int: ...

    def write_from(self, buffer: Bytes, offset: int) -> int: ...

    def close(self) -> None: ...


class Link(Protocol):
    """Moves the bytes of the device tier's tensors; returns how many."""

    def read_into(self, buffer: torch.Tensor, offset: int) -> int: ...

    def write_from(self, buffer: torch.Tensor, offset: int) -> int: ...


class HostLink:
    """Copies between an accelerator and pinned host memory; issued, not waited for."""

    def __init__(self, pool: HostPool, streams: Streams) -> None:
        self._pool = pool
        self._streams = streams

    def read_into(self, buffer: torch.Tensor, offset: int) -> int:
        self._streams.copy(buffer, self._pool.span(offset, buffer.numel()))
        return buffer.numel()

    def write_from(self, buffer: torch.Tensor, offset: int) -> int:
        self._streams.copy(self._pool.span(offset, buffer.numel()), buffer)
        return buffer.numel()


@dataclass
class _Block:
    """A bounce buffer and the mark after its last copy."""

    pool: HostPool
    last: Mark | None = None
    #: bytes and file offset of what waits to be written
    waiting: tuple[int, int] | None = field(default=None)


class DiskLink:
    """Between an accelerator and the disk, through blocks in pinned host memory.

    What is on disk is moved by the calling thread, so a read returns when its last copy is issued, and a
    write when its last byte is on disk. One thread per direction.

    Args:
        pin: Whether blocks are pinned.
    """

    def __init__(self, disk: DiskFile, streams: Streams, *, pin: bool) -> None:
        self._disk = disk
        self._streams = streams
        self._reading = [_Block(HostPool(BLOCK_BYTES, pin=pin)) for _ in range(_BLOCKS)]
        self._writing = [_Block(HostPool(BLOCK_BYTES, pin=pin)) for _ in range(_BLOCKS)]

    def read_into(self, buffer: torch.Tensor, offset: int) -> int:
        for index, start, size in _cut(buffer.numel()):
            block = self._reading[index]
            if block.last is not None:
                self._streams.finish(block.last)
            span = block.pool.span(0, size)
            self._disk.read_into(span, offset + start)
            self._streams.copy(buffer[start : start + size], span)
            block.last = self._streams.mark()
        return buffer.numel()

    def write_from(self, buffer: torch.Tensor, offset: int) -> int:
        for index, start, size in _cut(buffer.numel()):
            block = self._writing[index]
            self._empty(block)
            self._streams.copy(block.pool.span(0, size), buffer[start : start + size])
            block.last, block.waiting = self._streams.mark(), (size, offset + start)
            self._empty(self._writing[1 - index])
        for block in self._writing:
            self._empty(block)
        return buffer.numel()

    def _empty(self, block: _Block) -> None:
        if block.waiting is None:
            return
        size, offset = block.waiting
        self._streams.finish(block.last)
        self._disk.write_from(block.pool.span(0, size), offset)
        block.waiting = None

    def close(self) -> None:
        """Gives the blocks back; the file stays."""
        for block in (*self._reading, *self._writing):
            block.pool.close()


def _cut(size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Which block takes which bytes, in turn: index, start, size."""
    for number, start in enumerate(range(0, size_bytes, BLOCK_BYTES)):
        yield number % _BLOCKS, start, min(BLOCK_BYTES, size_bytes - start)


def host_view(memory: memoryview) -> torch.Tensor:
    """Host memory as a uint8 tensor, without a copy."""
    return torch.frombuffer(memory, dtype=torch.uint8) if memory.nbytes else torch.empty(0, dtype=torch.uint8)


class SlotHome:
    """An accelerator's slot as the host reads and fills it between two steps."""

    def __init__(self, slot: torch.Tensor) -> None:
        self._slot = slot

    def read_into(self, buffer: Bytes, offset: int) -> int:
        assert isinstance(buffer, memoryview), "expected host memory"
        host_view(buffer).copy_(self._slot[offset : offset + buffer.nbytes])
        return buffer.nbytes

    def write_from(self, buffer: Bytes, offset: int) -> int:
        assert isinstance(buffer, memoryview), "expected host memory"
        self._slot[offset : offset + buffer.nbytes].copy_(host_view(buffer))
        return buffer.nbytes

    def close(self) -> None:
        """The slot is its arena's."""
