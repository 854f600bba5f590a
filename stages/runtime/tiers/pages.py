"""Memory of its own pages for what comes back from disk.

torch's allocator puts a header before each block, so that no block starts on a page and every direct
transfer into one would go through a bounce buffer: a copy, and the interpreter's lock with it.
"""

from __future__ import annotations

import mmap

import torch

from stages.region.memory import LARGE_BLOCK_BYTES


def storage_on_pages(size_bytes: int) -> torch.UntypedStorage:
    """Storage that starts on a page border and leaves the process when it is freed.

    Small ones, which no page fault of theirs would repay, come from torch's allocator.
    """
    if size_bytes < LARGE_BLOCK_BYTES:
        return torch.UntypedStorage(size_bytes)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=private), dtype=torch.uint8).untyped_storage()
