"""Memory on page borders for what comes back from disk.

glibc puts a header before each block, so that no block starts on a page and every direct transfer into
one would go through a bounce buffer: a copy, and the interpreter's lock with it. Blocks of the page pool
(`stages/native`) start on pages.
"""

from __future__ import annotations

import mmap

import torch

from stages.region.memory import LARGE_BLOCK_BYTES


def storage_on_pages(size_bytes: int) -> torch.UntypedStorage:
    """Storage that starts on a page border. Without the pool it leaves the process when it is freed.

    Small ones, which no page fault of theirs would repay, come from torch's allocator.
    """
    storage = torch.UntypedStorage(size_bytes)
    if size_bytes < LARGE_BLOCK_BYTES or storage.data_ptr() % mmap.PAGESIZE == 0:
        return storage
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=private), dtype=torch.uint8).untyped_storage()
