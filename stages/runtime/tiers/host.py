"""Host memory beside an accelerator: one region, as large as the plan says, pinned where that works."""

from __future__ import annotations

import mmap
import warnings
from typing import Any

import torch

from stages.artifacts.errors import StorageError
from stages.runtime.tiers.memoryviews import Bytes, as_bytes, copy

#: what cudaHostRegister takes for "usable by every context"
_PORTABLE = 1


class HostPool:
    """A region of host memory, zero at first.

    It is mapped by us and pinned where it lies: an allocator of pinned memory rounds each request up,
    by as much as it asks for. Reads and writes by offset are those of the host; an accelerator's copies
    take `bytes` itself.

    Args:
        size_bytes: Not rounded up.
        pin: Whether an accelerator's copies will read and write it.

    Raises:
        StorageError: There is not so much memory.
    """

    def __init__(self, size_bytes: int, *, pin: bool) -> None:
        self.size_bytes = size_bytes
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._mapping = mmap.mmap(-1, max(size_bytes, mmap.PAGESIZE), flags=private)
        except OSError as error:
            raise StorageError(
                f"the host tier needs {size_bytes} bytes of memory: {error.strerror or error}. Lower "
                f"tiers.host_budget, or use a machine with more memory",
                key="tiers.host_budget",
                expected=f"{size_bytes} bytes",
            ) from error
        self.bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.pinned = pin and size_bytes > 0 and _pin(self.bytes)

    def read_into(self, buffer: Bytes, offset: int) -> int:
        """Copies from byte `offset` on; returns how many bytes."""
        view = as_bytes(buffer)
        copy(as_bytes(self.span(offset, view.nbytes)), view)
        return view.nbytes

    def write_from(self, buffer: Bytes, offset: int) -> int:
        """Copies to byte `offset` on; returns how many bytes."""
        view = as_bytes(buffer)
        copy(view, as_bytes(self.span(offset, view.nbytes)))
        return view.nbytes

    def span(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + size_bytes) as a uint8 tensor."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes} of a pool of {self.size_bytes}")
        return self.bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Unpins, and gives the memory back at once. Safe to call twice."""
        if self.pinned:
            torch.cuda.check_error(int(_cudart().cudaHostUnregister(self.bytes.data_ptr())))
            self.pinned = False
        self._mapping.madvise(mmap.MADV_DONTNEED)


def _cudart() -> Any:
    """torch's binding of the CUDA runtime, a module of its C++ library."""
    return torch.cuda.cudart()


def _pin(region: torch.Tensor) -> bool:
    """Pins memory for CUDA; where the system refuses (a limit of locked memory), warns once."""
    code = int(_cudart().cudaHostRegister(region.data_ptr(), region.numel(), _PORTABLE))
    if code == 0:
        return True
    warnings.warn(
        f"{region.numel()} bytes of host memory could not be pinned (cudaHostRegister: error {code}): copies "
        f"to and from the device go through the driver's own buffer, more slowly, and nothing overlaps with "
        f"them. Raise the limit of locked memory (ulimit -l), or lower tiers.host_budget",
        RuntimeWarning,
        stacklevel=3,
    )
    return False
