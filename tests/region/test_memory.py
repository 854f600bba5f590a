"""Gauges and allocator control, each setting in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stages.region import memory

MIB = 2**20


def run(script: str) -> list[int]:
    """Runs `script` in a fresh interpreter and returns the integers that it prints."""
    prelude = (
        "import ctypes\n"
        "from stages.region import memory\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = ctypes.c_void_p\n"
        "libc.free.argtypes = [ctypes.c_void_p]\n"
        "def block(size):\n"
        "    address = libc.malloc(ctypes.c_size_t(size))\n"
        "    ctypes.memset(address, 1, size)\n"
        "    return address\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prelude + script], capture_output=True, text=True, check=True, timeout=60
    )
    return [int(word) for word in done.stdout.split()]


def test_gauges_agree_and_the_peak_is_not_under_the_present() -> None:
    assert 0 < memory.resident_bytes() <= memory.peak_resident_bytes()


def test_the_peak_follows_a_block_and_forgets_it_after_reset() -> None:
    before, high, after = run(
        "memory.give_back_large_blocks(1 << 20)\n"
        "print(memory.peak_resident_bytes())\n"
        "libc.free(block(100 << 20))\n"
        "print(memory.peak_resident_bytes())\n"
        "assert memory.reset_peak()\n"
        "print(memory.peak_resident_bytes())\n"
    )
    assert high - before > 90 * MIB
    assert after - before < 10 * MIB


def test_a_refused_reset_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.write_text", refuse)
    assert memory.reset_peak() is False


#: Frees a large block first: by default that teaches glibc to keep blocks of such sizes, up to twice it
KEPT_AFTER_FREE = (
    "libc.free(block(30 << 20))\n"
    "blocks = [block(8 << 20) for _ in range(6)]\n"
    "full = memory.resident_bytes()\n"
    "for address in blocks: libc.free(address)\n"
    "print(full - memory.resident_bytes())\n"
)


def test_large_blocks_leave_the_process_when_freed() -> None:
    (given_back,) = run("assert memory.give_back_large_blocks(1 << 20)\n" + KEPT_AFTER_FREE)
    assert given_back > 40 * MIB


def test_without_control_they_stay_which_is_why_it_exists() -> None:
    (given_back,) = run(KEPT_AFTER_FREE)
    assert given_back < 10 * MIB


@pytest.mark.parametrize("threshold", [0, -1, 33 * MIB])
def test_a_threshold_that_glibc_would_refuse_is_refused(threshold: int) -> None:
    with pytest.raises(ValueError, match="32 MiB"):
        memory.give_back_large_blocks(threshold)


def test_another_allocator_is_reported_as_beyond_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "allocator_path", lambda: "/usr/lib/libtcmalloc.so.4")
    memory._glibc.cache_clear()
    try:
        assert memory.give_back_large_blocks(MIB) is False
        assert memory.trim() is False
    finally:
        memory._glibc.cache_clear()


def test_reading_the_gauges_needs_no_torch() -> None:
    (loaded,) = run("import sys\nmemory.peak_resident_bytes()\nprint(int('torch' in sys.modules))\n")
    assert loaded == 0


def test_threads_that_allocate_at_once_have_arenas_of_their_own() -> None:
    count = (
        "import threading\n"
        "def work():\n"
        "    libc.free(block(1000))\n"
        "    barrier.wait()\n"
        "barrier = threading.Barrier(4)\n"
        "others = [threading.Thread(target=work) for _ in range(3)]\n"
        "for thread in others: thread.start()\n"
        "barrier.wait()\n"
        "libc.open_memstream.restype = ctypes.c_void_p\n"
        "text, size = ctypes.c_char_p(), ctypes.c_size_t()\n"
        "stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))\n"
        "libc.malloc_info(0, stream)\n"
        "libc.fclose(stream)\n"
        "print(text.value.count(b'<heap nr='))\n"
    )
    assert run("memory.give_back_large_blocks(1 << 20)\n" + count) == [1]
    assert run("memory.give_back_large_blocks(1 << 20, threads=2)\n" + count) == [2]
