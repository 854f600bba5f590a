"""The script for a CUDA device, tried on the emulated one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import main


@pytest.mark.slow
def test_every_row_is_measured_and_written(tmp_path: Path) -> None:
    assert main(["--device", "emulated", "--steps", "3", "--results", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "gpu-emulated.json").read_text())["rows"]
    assert [row["failure"] for row in rows] == ["", "", ""]
    assert [row["way"] for row in rows] == [
        "this tool, all resident",
        "this tool, 20MB",
        "FSDP2 with CPU offload",
    ]
    assert rows[0]["losses"] == rows[1]["losses"]
    assert (tmp_path / "gpu-emulated.md").read_text().count("\n|") == 5
