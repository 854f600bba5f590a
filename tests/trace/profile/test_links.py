"""The disk is measured each way, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.artifacts.errors import StorageError
from stages.trace.profile import links


def test_both_directions_are_measured_and_nothing_is_left(tmp_path: Path) -> None:
    costs = links.measure_links(tmp_path, seconds=0.2)
    assert [cost.name for cost in costs] == ["disk_read", "disk_write"]
    for cost in costs:
        assert cost.latency_ns > 0
        assert 0 < cost.contended_bytes_per_s <= cost.bytes_per_s
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_hold_a_file_is_refused_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"tiers\.disk") as refusal:
        links.measure_links(tmp_path / "missing", seconds=0.1)
    assert refusal.value.key == "tiers.disk"
