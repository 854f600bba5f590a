"""The device tier's planned memory: one mapping on the CPU, one allocation on an accelerator,
cut into slots."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from stages.region import memory

#: a byte of ones is NaN in every float format, -1 or the largest value in integers, no boolean
POISON = 0xFF


class Arena:
    """One page-aligned anonymous mapping of `size_bytes`, zero at first.

    It is not taken from torch's allocator: pages become resident when first written, addresses are
    multiples of the page size (as O_DIRECT wants), and it goes back to the system whatever the
    allocator's settings are.

    Args:
        device: An accelerator, where it is one allocation instead, of any content; None: the CPU.
    """

    def __init__(self, size_bytes: int, device: torch.device | None = None) -> None:
        if size_bytes < 0:
            raise ValueError(f"arena of {size_bytes} bytes; expected 0 or more")
        self.size_bytes = size_bytes
        self._mapping = None
        if device is not None:
            self._bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._storage = self._bytes.untyped_storage()
            return
        # An empty mapping is an error to the kernel; a plan that streams nothing has an empty arena.
        self._mapping = memory.huge_mapping(max(size_bytes, mmap.PAGESIZE))
        self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._storage = self._bytes.untyped_storage()

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def slot(
        self, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor over the arena's memory from byte `offset` on.

        Slots share storage but no version counter: each starts as a tensor of its own, so autograd
        does not take a write into one slot for a write into another (a view of one large tensor
        would). The price is that it does not notice an overwrite of the same bytes either: whoever
        reuses memory must be right by the plan.

        Args:
            offset: In bytes, a multiple of the dtype's size.
            shape: In elements.
            stride: In elements.
        """
        if offset < 0 or offset % dtype.itemsize:
            raise ValueError(f"slot at byte {offset}; expected a multiple of {dtype.itemsize}, 0 or more")
        end = offset + _span(shape, stride) * dtype.itemsize
        if end > self.size_bytes:
            raise ValueError(f"slot ends at byte {end}; the arena has {self.size_bytes}")
        slot = torch.empty(0, dtype=dtype, device=self._storage.device)
        return slot.set_(self._storage, offset // dtype.itemsize, tuple(shape), tuple(stride))

    def poison(self, offset: int, size_bytes: int) -> None:
        """Fills a span with bytes of ones: NaN in floats, out of range in indices."""
        self.span(offset, size_bytes).fill_(POISON)

    def span(self, offset: int, size_bytes: int) -> torch.Tensor:
        """Bytes [offset, offset + size_bytes) as a uint8 tensor."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError(f"bytes {offset} to {offset + size_bytes}; the arena has {self.size_bytes}")
        return self._bytes[offset : offset + size_bytes]

    def close(self) -> None:
        """Gives the physical memory back at once. Slots that are still held on the CPU then read zeros;
        an accelerator's memory goes with the last of them."""
        if self._mapping is not None:
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            del self._bytes, self._storage


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
