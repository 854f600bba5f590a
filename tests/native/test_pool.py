"""The page pool in processes of their own: contents stay, memory is what is live, pages come back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.artifacts.errors import ConfigError
from stages.native.build import PagePool, _page_pool, page_pool

PRELUDE = """
import ctypes, random, resource, sys, threading
libc = ctypes.CDLL(None)
libc.free.argtypes = [ctypes.c_void_p]
libc.realloc.restype = ctypes.c_void_p
libc.realloc.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.malloc_usable_size.argtypes = [ctypes.c_void_p]
libc.malloc_usable_size.restype = ctypes.c_size_t
for name in ("kept_bytes", "live_bytes", "free_bytes", "segments", "moves"):
    getattr(libc, "stages_pool_" + name).restype = ctypes.c_size_t
MIB = 1 << 20
def take(size, alignment=64):
    address = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(alignment), ctypes.c_size_t(size)) == 0
    assert address.value % alignment == 0
    return address.value
def fill(address, size, byte): ctypes.memset(address, byte, size)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = page_pool("pool", tmp_path_factory.mktemp("native"))
    assert found.library is not None
    return found.library


def run(library: Path, script: str) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_freed_pages_serve_blocks_of_other_sizes(library: Path) -> None:
    """Sixteen freed blocks of 4 MiB make one of 64 MiB: nothing new becomes resident, hardly a fault."""
    grown, faulted, moved = run(
        library,
        "blocks = [take(4 * MIB) for _ in range(32)]\n"
        "for block in blocks: fill(block, 4 * MIB, 1)\n"
        "for block in blocks[::2]: libc.free(block)\n"
        "before, counted = resident(), faults()\n"
        "large = take(64 * MIB)\n"
        "fill(large, 64 * MIB, 2)\n"
        "print(resident() - before, faults() - counted, libc.stages_pool_moves())\n",
    )
    assert grown < 2**20
    assert faulted < 200  # 16384 without the pool
    assert moved >= 16


def test_contents_stay_whatever_is_taken_and_freed(library: Path) -> None:
    live_left, excess = run(
        library,
        "generator = random.Random(0)\n"
        "held, live, most = {}, 0, 0\n"
        "start = resident()\n"
        "for turn in range(4000):\n"
        "    if held and (live > 150 * MIB or generator.random() < 0.5):\n"
        "        address = generator.choice(list(held))\n"
        "        size, byte = held.pop(address)\n"
        "        assert ctypes.string_at(address, size) == bytes([byte]) * size, turn\n"
        "        libc.free(address)\n"
        "        live -= -(-size // 4096) * 4096\n"
        "    else:\n"
        "        size, byte = generator.randrange(1, 3 * MIB) + 100_000, generator.randrange(256)\n"
        "        address = take(size)\n"
        "        assert address not in held\n"
        "        fill(address, size, byte)\n"
        "        held[address] = (size, byte)\n"
        "        live += -(-size // 4096) * 4096\n"
        "        most = max(most, live)\n"
        "    assert libc.stages_pool_segments() < 16500\n"
        "peak = int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) * 1024\n"
        "excess = peak - start - most\n"
        "for address in held: libc.free(address)\n"
        "print(libc.stages_pool_live_bytes(), excess)\n",
    )
    assert live_left == 0
    # what the interpreter itself used meanwhile: the bytes it compared
    assert excess < 16 * 2**20


def test_threads_share_it(library: Path) -> None:
    (left,) = run(
        library,
        "def work(byte):\n"
        "    generator = random.Random(byte)\n"
        "    for _ in range(300):\n"
        "        size = generator.randrange(128 * 1024, 2 * MIB)\n"
        "        address = take(size)\n"
        "        fill(address, size, byte)\n"
        "        other = take(size + 5000)\n"
        "        fill(other, size, 255 - byte)\n"
        "        assert ctypes.string_at(address, size) == bytes([byte]) * size\n"
        "        libc.free(other)\n"
        "        libc.free(address)\n"
        "failures = []\n"
        "def guarded(byte):\n"
        "    try: work(byte)\n"
        "    except AssertionError as error: failures.append(error)\n"
        "threads = [threading.Thread(target=guarded, args=(n,)) for n in range(1, 5)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "assert not failures\n"
        "print(libc.stages_pool_live_bytes())\n",
    )
    assert left == 0


def test_release_gives_free_pages_to_the_system_and_nothing_else(library: Path) -> None:
    kept, given = run(
        library,
        "kept, gone = take(20 * MIB), take(40 * MIB)\n"
        "fill(kept, 20 * MIB, 7); fill(gone, 40 * MIB, 8)\n"
        "libc.free(gone)\n"
        "before = resident()\n"
        "libc.stages_pool_release()\n"
        "assert ctypes.string_at(kept, 20 * MIB) == bytes([7]) * (20 * MIB)\n"
        "print(libc.stages_pool_live_bytes(), before - resident())\n",
    )
    assert kept == 20 * 2**20
    assert given >= 39 * 2**20


def test_small_blocks_and_wide_alignments_are_the_other_allocators(library: Path) -> None:
    (live,) = run(
        library,
        "small, aligned = take(100_000), take(MIB, 2 * MIB)\n"
        "fill(small, 100_000, 1); fill(aligned, MIB, 1)\n"
        "print(libc.stages_pool_live_bytes())\n"
        "libc.free(small); libc.free(aligned)\n",
    )
    assert live == 0


def test_small_blocks_are_kept_for_the_thread_that_frees_them(library: Path) -> None:
    same, other, most, released = run(
        library,
        "first = take(3000)\n"
        "libc.free(first)\n"
        "print(int(take(2900) == first))\n"
        "found = []\n"
        "libc.free(first)\n"
        "thread = threading.Thread(target=lambda: found.append(take(3000)))\n"
        "thread.start(); thread.join()\n"
        "print(int(found[0] == first))\n"
        "blocks = [take(random.Random(n).randrange(64, 128 * 1024)) for n in range(500)]\n"
        "for block in blocks: libc.free(block)\n"
        "print(libc.stages_pool_kept_bytes())\n"
        "libc.stages_pool_release()\n"
        "print(libc.stages_pool_kept_bytes())\n",
    )
    assert (same, other, released) == (1, 0, 0)
    assert 64 * 1024 < most <= 256 * 1024


def test_threads_that_end_give_their_small_blocks_back(library: Path) -> None:
    (grown,) = run(
        library,
        "def work():\n"
        "    blocks = [take(50_000) for _ in range(5)]\n"
        "    for block in blocks: fill(block, 50_000, 1); libc.free(block)\n"
        "    assert libc.stages_pool_kept_bytes() > 200_000\n"
        "def once():\n"
        "    thread = threading.Thread(target=work); thread.start(); thread.join()\n"
        "for _ in range(50): once()\n"
        "before = resident()\n"
        "for _ in range(400): once()\n"
        "print(resident() - before)\n",
    )
    assert grown < 4 * 2**20  # 80 MB if each kept what it had


def test_small_blocks_of_many_threads_keep_their_contents(library: Path) -> None:
    (failures,) = run(
        library,
        "failures = []\n"
        "shared, lock = [], threading.Lock()\n"
        "def work(byte):\n"
        "    generator, held = random.Random(byte), []\n"
        "    for _ in range(3000):\n"
        "        if held and generator.random() < 0.5:\n"
        "            address, size, value = held.pop(generator.randrange(len(held)))\n"
        "            if ctypes.string_at(address, size) != bytes([value]) * size: failures.append(byte)\n"
        "            with lock:\n"  # some are freed by another thread than took them
        "                shared.append(address)\n"
        "                address = shared.pop(generator.randrange(len(shared)))\n"
        "            libc.free(address)\n"
        "        else:\n"
        "            size = int(2 ** generator.uniform(0, 18))\n"
        "            address = take(size, 2 ** generator.randrange(3, 9))\n"
        "            value = generator.randrange(256)\n"
        "            fill(address, size, value)\n"
        "            held.append((address, size, value))\n"
        "threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(len(failures))\n",
    )
    assert failures == 0


def test_alignments_that_are_none_are_refused_as_ever(library: Path) -> None:
    codes = run(
        library,
        "address = ctypes.c_void_p()\n"
        "for alignment in (0, 4, 24, 63):\n"
        "    size = ctypes.c_size_t(100)\n"
        "    print(libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(alignment), size))\n",
    )
    assert set(codes) == {errno.EINVAL}


def test_reallocation_keeps_contents(library: Path) -> None:
    usable, left = run(
        library,
        "block = take(MIB)\n"
        "fill(block, MIB, 9)\n"
        "usable = libc.malloc_usable_size(block)\n"
        "block = libc.realloc(block, 3 * MIB)\n"
        "assert ctypes.string_at(block, MIB) == bytes([9]) * MIB\n"
        "libc.free(block)\n"
        "print(usable, libc.stages_pool_live_bytes())\n",
    )
    assert usable == 2**20
    assert left == 0


def test_children_do_not_inherit_it(library: Path) -> None:
    assert run(
        library,
        "import os, subprocess\n"
        "assert 'LD_PRELOAD' not in os.environ\n"
        "code = 'import ctypes; print(int(hasattr(ctypes.CDLL(None), \"stages_pool_release\")))'\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)\n",
    ) == [0]


# where it cannot be had


@pytest.mark.parametrize("compiler", ["/bin/false", "/nonexistent/cc", "true"])
def test_a_compiler_that_does_not_work_is_named(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    _page_pool.cache_clear()
    try:
        found = page_pool("auto", tmp_path / "native")
        assert found.library is None
        assert compiler in found.reason
        assert found.name == "system"
        with pytest.raises(ConfigError, match=r"runtime\.allocator=pool"):
            page_pool("pool", tmp_path / "native")
    finally:
        _page_pool.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


def test_another_preloaded_library_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    _page_pool.cache_clear()
    try:
        assert "other.so" in page_pool("auto", tmp_path).reason
    finally:
        _page_pool.cache_clear()


def test_a_damaged_library_is_made_again(library: Path, tmp_path: Path) -> None:
    (tmp_path / library.name).write_bytes(library.read_bytes()[:5000])
    _page_pool.cache_clear()
    try:
        found = page_pool("auto", tmp_path)
    finally:
        _page_pool.cache_clear()
    assert found.library == tmp_path / library.name
    assert len(found.library.read_bytes()) > 5000


def test_none_is_wanted() -> None:
    assert page_pool("system") == PagePool(None, "runtime.allocator=system")
