"""The command, run as a person runs it: in a process of its own, from an empty folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stages

ROOT = Path(stages.__file__).parents[1]


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str
    folder: Path

    def record(self, name: str) -> dict[str, Any]:
        """A JSON file of the run folder."""
        return json.loads((self.folder / name).read_text())


def run(
    folder: Path, *arguments: str, name: str = "out", environment: Mapping[str, str] | None = None
) -> Finished:
    """`python -m stages.run ARGUMENTS` in `folder`, artifacts and scratch there too."""
    out = folder / name
    line = [sys.executable, "-m", "stages.run", *arguments]
    line += [f"hydra.run.dir={out}", f"store={folder / 'store'}", f"tiers.disk={folder / 'disk'}"]
    paths = [str(ROOT), str(folder)]
    done = subprocess.run(
        line,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, out)
