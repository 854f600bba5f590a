"""The endurance benchmark, in a short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.endurance import Endurance, Run, judge, table
from tests.commands.jobs import ROOT


@pytest.mark.slow
def test_a_run_that_is_killed_and_resumed_gives_the_undisturbed_numbers(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "benchmarks.endurance", "--steps", "24", "--kills", "2", "--every", "5"]
    line += ["--out", str(tmp_path / "endurance.md")]
    finished = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "bitwise those of run 1" in (tmp_path / "endurance.md").read_text()


def test_what_went_wrong_stands_in_place_of_the_claim() -> None:
    run = Run(10**9, "auto", 0, 3, "finished", 0, 2 * 10**9, 0, 0)
    text = table([run, run], ["run 2 took 2000000000 bytes of 1000000000"], 3, 1, 60.0)
    assert "- run 2 took 2000000000 bytes" in text
    assert "bitwise" not in text


def _judged(folder: Path, moved: int) -> list[str]:
    """The problems of an undisturbed run and one that was killed at step 4, its budget 600 of 900 MB."""
    job = Endurance(folder, 8, 2)
    for name in ("scratch", "checkpoints"):
        (folder / name).mkdir()
    first = Run(10**9, "auto", 0, 8, "finished", 0, 9 * 10**8, 0, 0)
    killed = Run(6 * 10**8, "milp", 0, 4, "SIGKILL to the job", -9, 55 * 10**7, 4, moved)
    judge(job, [first, killed], 2)
    return job.problems


def test_a_budget_that_is_tight_is_no_problem(tmp_path: Path) -> None:
    assert _judged(tmp_path, moved=10**6) == []


def test_a_budget_under_which_nothing_moves_is_a_problem(tmp_path: Path) -> None:
    assert [problem.split(":")[0] for problem in _judged(tmp_path, moved=0)] == ["run 2 moved nothing"]
