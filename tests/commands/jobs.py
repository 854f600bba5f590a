"""Running the command as a user does, and reading what it leaves."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from tests.memory_limit import Limited, run_limited

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """A finished run: its exit code, what it printed, and the folder with its files."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return self._json("summary.json")

    @property
    def error(self) -> dict[str, Any]:
        return self._json("error.json")

    def _json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text())


def command(folder: Path, store: Path, *overrides: str) -> list[str]:
    """The command line. Its disk tier is beside the store, unless an override names another: costs
    are measured on one disk and not reused for another."""
    settings = [f"hydra.run.dir={folder}", f"store={store}"]
    if not any(item.startswith("tiers.disk=") for item in overrides):
        settings.append(f"tiers.disk={store.parent / 'disk'}")
    return [sys.executable, "-m", "stages.run", *overrides, *settings]


def run_job(folder: Path, store: Path, *overrides: str, timeout_s: float = 900) -> Job:
    finished = subprocess.run(
        command(folder, store, *overrides),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return Job(finished.returncode, finished.stdout, folder)


def run_job_limited(
    folder: Path, store: Path, limit_bytes: int, *overrides: str, timeout_s: float = 1800
) -> tuple[Job, Limited]:
    """As `run_job`, all of its processes in a memory cgroup of `limit_bytes`."""
    limited = run_limited(command(folder, store, *overrides), limit_bytes, cwd=ROOT, timeout_s=timeout_s)
    return Job(limited.code, limited.output, folder), limited


def write_tokens(path: Path, rows: int, seq_len: int, vocabulary: int) -> Path:
    tokens = numpy.random.default_rng(7).integers(0, vocabulary, (rows, seq_len), dtype=numpy.int64)
    numpy.save(path, tokens)
    return path
