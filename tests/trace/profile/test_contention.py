"""What transfers and compute take from each other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stages.trace.profile.contention import fitted
from stages.trace.profile.links import measure_links


def test_the_fit_goes_through_losses_that_add_up() -> None:
    assert fitted(0.1, 0.2, 0.3) == pytest.approx((0.1, 0.2))


def test_the_fit_splits_the_error_evenly_over_the_three_measurements() -> None:
    reading, writing = fitted(0.1, 0.2, 0.36)
    assert (reading, writing) == pytest.approx((0.12, 0.22))
    assert 0.36 - (reading + writing) == pytest.approx(0.02)


def test_the_fit_stays_between_nothing_and_what_leaves_compute_some_speed() -> None:
    assert fitted(0.0, 0.0, -0.3) == (0.0, 0.0)
    assert fitted(0.9, 0.9, 0.9) == (0.45, 0.45)


def test_links_beside_compute_are_never_faster_than_alone(tmp_path: Path) -> None:
    runs = []

    def compute() -> None:
        runs.append(time.perf_counter())
        sum(range(100_000))

    for link in measure_links(tmp_path, seconds=0.5, compute=compute):
        assert 0 < link.busy_bytes_per_s <= link.bytes_per_s
        assert 0 < link.busy_contended_bytes_per_s <= min(link.contended_bytes_per_s, link.busy_bytes_per_s)
        assert 0 <= link.compute_slowdown_ppm <= 450_000
        assert link.scattered_block_ns >= 0
    assert len(runs) >= 12  # alone and beside reading, writing and both, at least twice each
    assert list(tmp_path.iterdir()) == []


def test_without_compute_nothing_is_said_of_it(tmp_path: Path) -> None:
    for link in measure_links(tmp_path, seconds=0.1):
        assert link.busy_bytes_per_s == link.busy_contended_bytes_per_s == link.compute_slowdown_ppm == 0
