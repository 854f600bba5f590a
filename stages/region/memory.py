"""Memory gauges of this process, and what its allocator does with freed blocks.

Reads /proc and calls glibc through ctypes; no torch. glibc raises its own mapping threshold each
time that a mapped block is freed, after which freed memory stays in the process: the peak is then
above what counting bytes predicts. `give_back_large_blocks` switches that off. In a process that
has the page pool (`stages/native/pool.c`), large blocks are the pool's: freed pages stay, and serve
the next blocks whatever their sizes, so that the peak is the same. Sources: mallopt(3), proc(5).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from contextlib import suppress
from pathlib import Path

#: blocks of this size or more leave the process when freed, so that counting bytes predicts the peak;
#: smaller ones share heap pages, which the saved tensors of one region would hold for all
LARGE_BLOCK_BYTES = 128 * 1024

#: parameters of mallopt(3), from glibc's malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_ARENA_MAX = -8

#: glibc refuses a mapping threshold above half of its largest heap (HEAP_MAX_SIZE / 2 on 64 bits)
_LARGEST_MMAP_THRESHOLD_BYTES = 32 * 2**20
#: glibc's own limit of mapped blocks (DEFAULT_MMAP_MAX) is 65,536; a training step stays far below it
_MMAP_COUNT = 65_536
#: unused memory at the top of the heap that is given back at once; below it, the cost of asking
#: for it again would exceed what it saves
_SMALL_TRIM_BYTES = 128 * 1024


def resident_bytes() -> int:
    """Resident memory of this process now (VmRSS: anonymous, file and shared pages)."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident memory of this process since its start or the last `reset_peak` (VmHWM)."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Sets the peak to the present resident memory.

    Returns:
        False where the kernel does not let this process do so: the peak then covers all its life.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def allocator_path() -> str:
    """The file of the library that serves `malloc` here: glibc's, or that of a preloaded allocator."""
    return _file_of(ctypes.CDLL(None).malloc)


def _file_of(function: object) -> str:
    found = _SymbolInfo()
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type] - a foreign function is a pointer
    if not ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) or not found.file_name:
        return ""
    return os.fsdecode(found.file_name)


def trim() -> bool:
    """Gives free memory back to the system. Returns whether the allocator can do so at all."""
    pool = _pool()
    if pool is not None:
        pool.stages_pool_release()
    library = _glibc()
    if library is None:
        return False
    library.malloc_trim(0)
    return True


def huge_mapping(size_bytes: int) -> mmap.mmap:
    """Private memory of its own, zero at first, on pages of 2 MiB where the kernel has them.

    For what becomes resident as a whole: a direct transfer pins and unpins 512 times fewer pages there (a
    third more bytes per second and a sixth of the processor's time, measured).
    """
    # the default is shared, which no one could give back
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a kernel without huge pages refuses the hint; everything works as well on small ones
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def pool_path() -> str:
    """The file of the page pool that this process was started with; "": there is none."""
    pool = _pool()
    return "" if pool is None else _file_of(pool.stages_pool_release)


def allocator_name() -> str:
    """What serves large blocks here: "page pool", "glibc", or the file of another allocator."""
    if _pool() is not None:
        return "page pool"
    return "glibc" if _glibc() is not None else Path(allocator_path()).name


def give_back_large_blocks(threshold_bytes: int, threads: int = 1) -> bool:
    """Makes every block of `threshold_bytes` or more leave the process the moment it is freed.

    Each such block gets a mapping of its own. Call it before the first large allocation and before
    threads start, since arenas that exist are kept.

    Args:
        threshold_bytes: At most 32 MiB, which is as far as glibc goes.
        threads: That compute at once. Operators allocate scratch from all of them: with one arena they
            wait for each other's lock (attention's backward then takes 2.5 times as long, measured).

    Returns:
        False where `malloc` is not glibc's: freed memory may then stay in the process.
    """
    if not 0 < threshold_bytes <= _LARGEST_MMAP_THRESHOLD_BYTES:
        raise ValueError(
            f"threshold of {threshold_bytes} bytes; expected 1 to {_LARGEST_MMAP_THRESHOLD_BYTES} (32 MiB)"
        )
    return _set_options(
        {
            # no more arenas than that: blocks freed by a lane's thread go back to where others allocate
            _ARENA_MAX: max(1, threads),
            _MMAP_MAX: _MMAP_COUNT,
            _MMAP_THRESHOLD: threshold_bytes,
            _TRIM_THRESHOLD: _SMALL_TRIM_BYTES,
            _TOP_PAD: 0,
        }
    )


class _SymbolInfo(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = [
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024  # given in kB
    raise OSError(f"/proc/self/status has no {field}; this needs Linux with /proc mounted")


@functools.cache
def _pool() -> ctypes.CDLL | None:
    """The page pool, where this process was started with it."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "stages_pool_release") else None


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """glibc, where it is what serves `malloc`; None under musl or a preloaded allocator."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return None
    name = Path(allocator_path()).name
    return library if name.startswith(("libc.so", "libc-")) else None


def _set_options(options: dict[int, int]) -> bool:
    library = _glibc()
    if library is None:
        return False
    # All are set before any is judged: one that is refused must not keep the others from being set.
    accepted = [library.mallopt(option, value) == 1 for option, value in options.items()]
    return all(accepted)
