"""The disk tier: one scratch file, read and written past the page cache.

The page cache counts as the process's memory in a cgroup, so transfers use O_DIRECT. That wants
block-aligned file offsets, lengths and memory addresses: whatever is not goes through a small bounce
buffer. (Devices that take any address in short transfers were seen to refuse it in long ones.) All
calls release the GIL while the kernel works.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from stages.artifacts.plan import ALIGNMENT
from stages.runtime.tiers import space
from stages.runtime.tiers.memoryviews import Bytes, address_of, as_bytes, copy

#: bytes of one system call at most: enough for full bandwidth, and a lane notices an abort soon
BLOCK_BYTES = 16 * 2**20
#: bytes that the buffer for what cannot go straight holds; one exists per thread that needs it at once
BOUNCE_BYTES = 4 * 2**20


class DiskFile:
    """A scratch file of fixed size with its space reserved.

    Calls from several threads may run at once as long as their byte ranges do not overlap.

    Args:
        folder: An existing, writable folder.
        size_bytes: Size of the file; may be 0.

    Raises:
        StorageError: Too little space is free, or the folder cannot hold the file.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        self.folder = folder
        self.size_bytes = _round_up(size_bytes)
        self._bounces: list[mmap.mmap] = []
        self._partial_block = threading.Lock()
        space.check_free_space(folder, self.size_bytes)
        #: direct: whether transfers pass the page cache by
        self._descriptor, self.direct = space.open_nameless(folder)
        try:
            space.reserve(self._descriptor, folder, self.size_bytes)
            self._probe()
        except BaseException:  # also an interrupt must not leave the space taken
            self.close()
            raise

    def read_into(self, buffer: Bytes, offset: int) -> int:
        """Fills `buffer` from byte `offset` of the file on.

        Returns:
            Bytes read: the size of `buffer`.

        Raises:
            StorageError: The device failed, or the file ends before.
        """
        view = as_bytes(buffer)
        for start, stop, straight in self._pieces(view, offset):
            if straight:
                self._transfer(view[start:stop], offset + start, writing=False)
            else:
                self._read_bounced(view[start:stop], offset + start)
        self._drop_cache(offset, view.nbytes, written=False)
        return view.nbytes

    def write_from(self, buffer: Bytes, offset: int, *, pad: bool = False) -> int:
        """Writes `buffer` at byte `offset` of the file.

        Args:
            pad: Whether the bytes from the end of `buffer` to the next block border hold nothing
                that is wanted: they are then overwritten, which saves reading them first.

        Returns:
            Bytes written: the size of `buffer`.

        Raises:
            StorageError: The device failed or is full.
        """
        view = as_bytes(buffer)
        for start, stop, straight in self._pieces(view, offset):
            if straight:
                self._transfer(view[start:stop], offset + start, writing=True)
            else:
                self._write_bounced(view[start:stop], offset + start, pad=pad and stop == view.nbytes)
        self._drop_cache(offset, view.nbytes, written=True)
        return view.nbytes

    def close(self) -> None:
        """Frees the file's space. Safe to call twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        self._bounces.clear()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _probe(self) -> None:
        """Reads a block: some filesystems take the flag of direct I/O and refuse the transfers."""
        if not self.direct or self.size_bytes == 0:
            return
        with self._bounce() as bounce:
            try:
                os.preadv(self._descriptor, [bounce[:ALIGNMENT]], 0)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise space.failed(self.folder, "read", 0, ALIGNMENT, error) from error
        self._descriptor = space.reopen_buffered(self._descriptor)
        self.direct = False
        space.warn_of_page_cache(self.folder)

    def _pieces(self, view: memoryview, offset: int) -> list[tuple[int, int, bool]]:
        """Cuts a transfer into (start, stop, whether it may go straight between memory and file)."""
        size = view.nbytes
        if not 0 <= offset <= offset + size <= self.size_bytes:
            raise ValueError(
                f"bytes {offset} to {offset + size} of a scratch file of {self.size_bytes} bytes"
            )
        if not self.direct:
            return [(0, size, True)]
        head = min(-offset % ALIGNMENT, size)
        tail = max(head, size - (offset + size) % ALIGNMENT)
        if (address_of(view) + head) % ALIGNMENT:
            return [(0, size, False)]
        return [(0, head, False), (head, tail, True), (tail, size, False)]

    def _transfer(self, view: memoryview, offset: int, *, writing: bool) -> None:
        """Moves memory that needs no bounce, in as many system calls as it takes."""
        call, verb = (os.pwritev, "write") if writing else (os.preadv, "read")
        done = 0
        while done < view.nbytes:
            part = view[done : done + BLOCK_BYTES]
            try:
                moved = call(self._descriptor, [part], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise space.failed(self.folder, verb, offset + done, part.nbytes, error) from error
            if self.direct and moved < part.nbytes:
                moved -= moved % ALIGNMENT  # a direct transfer can only go on from a block border
            if moved == 0:
                raise space.short(self.folder, verb, offset + done, view.nbytes - done)
            done += moved

    def _read_bounced(self, view: memoryview, offset: int) -> None:
        with self._bounce() as bounce:
            for start in range(0, view.nbytes, BOUNCE_BYTES):
                part = view[start : start + BOUNCE_BYTES]
                skip = (offset + start) % ALIGNMENT
                blocks = bounce[: _round_up(skip + part.nbytes)]
                self._transfer(blocks, offset + start - skip, writing=False)
                copy(blocks[skip : skip + part.nbytes], part)

    def _write_bounced(self, view: memoryview, offset: int, *, pad: bool) -> None:
        with self._bounce() as bounce:
            for start in range(0, view.nbytes, BOUNCE_BYTES):
                part = view[start : start + BOUNCE_BYTES]
                last = start + part.nbytes == view.nbytes
                self._write_part(part, offset + start, bounce, pad=pad and last)

    def _write_part(self, part: memoryview, offset: int, bounce: memoryview, *, pad: bool) -> None:
        skip = offset % ALIGNMENT
        end = skip + part.nbytes
        blocks = bounce[: _round_up(end)]
        keeps_tail = end < blocks.nbytes and not pad
        if skip == 0 and not keeps_tail:
            copy(part, blocks[:end])
            self._transfer(blocks, offset, writing=True)
            return
        # Another thread may own the other bytes of these blocks: read, change and write as one.
        with self._partial_block:
            if skip:
                self._transfer(blocks[:ALIGNMENT], offset - skip, writing=False)
            if keeps_tail and (skip == 0 or blocks.nbytes > ALIGNMENT):
                last = blocks.nbytes - ALIGNMENT
                self._transfer(blocks[last:], offset - skip + last, writing=False)
            copy(part, blocks[skip:end])
            self._transfer(blocks, offset - skip, writing=True)

    @contextmanager
    def _bounce(self) -> Iterator[memoryview]:
        """A page-aligned buffer of one block more than BOUNCE_BYTES, for data that starts inside one."""
        try:
            bounce = self._bounces.pop()  # atomic, so it needs no lock
        except IndexError:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            bounce = mmap.mmap(-1, BOUNCE_BYTES + ALIGNMENT, flags=private)
        try:
            yield memoryview(bounce)
        finally:
            self._bounces.append(bounce)

    def _drop_cache(self, offset: int, size_bytes: int, *, written: bool) -> None:
        if self.direct:
            return
        try:
            if written:
                os.fdatasync(self._descriptor)  # only clean pages can be dropped
            os.posix_fadvise(self._descriptor, offset, size_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise space.failed(self.folder, "write", offset, size_bytes, error) from error


def _round_up(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
