"""Case 18: pinned host memory takes what was booked, and where it cannot be pinned, that is said."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from stages.runtime.tiers import host
from stages.runtime.tiers.host import HostPool

REGIONS, REGION_BYTES = 8, 9 * 2**20


class FakeRuntime:
    """As much of the CUDA runtime as pinning takes; `code` is what registering returns."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if self.code == 0:
            self.registered[address] = size_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


def pool_on(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> HostPool:
    monkeypatch.setattr(host, "_cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    return HostPool(REGIONS * REGION_BYTES, pin=True)


def fill(pool: HostPool, source: torch.Tensor | None = None) -> None:
    source = torch.empty(REGION_BYTES, dtype=torch.uint8) if source is None else source
    for index in range(REGIONS):
        pool.write_from(source.fill_(index + 1), index * REGION_BYTES)


def assert_filled(pool: HostPool) -> None:
    back = torch.empty(REGION_BYTES, dtype=torch.uint8)
    for index in range(REGIONS):
        pool.read_into(back, index * REGION_BYTES)
        assert int(back.min()) == int(back.max()) == index + 1


def test_all_regions_are_pinned_where_they_lie_and_unpinned_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = FakeRuntime(0)
    pool = pool_on(monkeypatch, runtime)
    assert pool.pinned
    assert list(runtime.registered.values()) == [REGIONS * REGION_BYTES]
    fill(pool)
    assert_filled(pool)
    pool.close()
    assert runtime.registered == {}


def test_the_host_grows_by_what_was_booked() -> None:
    """In a process of its own: another's freed pages would hide the growth."""
    code = (
        "import torch\n"
        "from stages.region import memory\n"
        "from tests.cases import test_case_18 as case\n"
        "monkeypatch = case.pytest.MonkeyPatch()\n"
        "source = torch.ones(case.REGION_BYTES, dtype=torch.uint8)\n"
        "before = memory.resident_bytes()\n"
        "pool = case.pool_on(monkeypatch, case.FakeRuntime(0))\n"
        "case.fill(pool, source)\n"
        "print(memory.resident_bytes() - before)\n"
        "pool.close()\n"
        "print(memory.resident_bytes() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    booked = REGIONS * REGION_BYTES
    assert 0.9 * booked < grown <= 1.1 * booked
    assert left < 0.3 * booked


def test_what_cannot_be_pinned_is_pageable_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match=r"could not be pinned.*ulimit -l"):
        pool = pool_on(monkeypatch, FakeRuntime(2))
    assert not pool.pinned
    fill(pool)
    assert_filled(pool)
    pool.close()
