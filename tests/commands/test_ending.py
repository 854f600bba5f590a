"""Runs that a person, a service manager or the kernel ends, and what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.commands.jobs import ROOT, Job, command, run_job

_SMALL = ("+model=mlp", "+model.arguments.dropout=0.1", "data.batch_size=2", "data.seq_len=32", "budget=2GB")
#: never reached
_MANY = "steps=1000000"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run whose store and disk serve the module."""
    folder = tmp_path_factory.mktemp("prepared")
    job = run_job(folder / "run", folder / "store", *_SMALL, "steps=3", "solver.replan=never")
    assert job.code == 0, job.output
    return job


class Running:
    """A run under way, in a session of its own."""

    def __init__(self, folder: Path, store: Path, *overrides: str) -> None:
        self.folder = folder
        line = command(folder, store, *_SMALL, "solver.replan=never", *overrides)
        self.process = subprocess.Popen(
            line,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""

    def until(self, pattern: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if re.search(pattern, line):
                return line
        raise AssertionError(f"{pattern} never came:\n{self.output}")

    def pids(self) -> list[int]:
        """The composing process and the stage's."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def end(self) -> int:
        """Its exit code; all processes that write to its output are gone then."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(timeout=30)


def to_composer(running: Running, number: int) -> None:
    os.kill(running.process.pid, number)


def to_stage(running: Running, number: int) -> None:
    os.kill(running.pids()[1], number)


def to_group(running: Running, number: int) -> None:
    os.killpg(running.process.pid, number)


def to_all(running: Running, number: int) -> None:
    """As a service manager does; both see it, in either order."""
    for pid in reversed(running.pids()):
        os.kill(pid, number)


def to_all_composer_first(running: Running, number: int) -> None:
    pids = running.pids()
    os.kill(pids[0], number)
    time.sleep(0.2)
    for pid in pids[1:]:
        with contextlib.suppress(ProcessLookupError):  # a step is short here
            os.kill(pid, number)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "error.json").read_text())


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (to_composer, signal.SIGTERM),
        pytest.param(to_composer, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(to_stage, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(to_group, signal.SIGINT, marks=pytest.mark.slow),
        (to_all, signal.SIGTERM),
        pytest.param(to_all_composer_first, signal.SIGTERM, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_step_is_finished_the_state_saved_and_how_to_go_on_said(
    tmp_path: Path, prepared: Job, send: Callable[[Running, int], None], number: signal.Signals
) -> None:
    running = Running(tmp_path / "run", prepared.folder.parent / "store", _MANY)
    running.until(r"^step 4/")
    send(running, number)
    assert running.end() == 128 + number, running.output
    [step] = saved(tmp_path / "run")
    said = f"stopped after {step.replace('-', ' ')} of 1000000, its state saved"
    assert said in running.output
    error = record(tmp_path / "run")
    assert (error["kind"], error["expected"]) == ("stopped", f"resume={tmp_path}/run/checkpoints/{step}")
    assert f"with {error['expected']}" in running.output
    assert [*(prepared.folder.parent / "disk").iterdir()] == []
    assert "Traceback" not in running.output


def test_what_it_says_goes_on_with_the_numbers_of_an_undisturbed_run(tmp_path: Path, prepared: Job) -> None:
    store = prepared.folder.parent / "store"
    folder = tmp_path / "a=folder, mine"
    running = Running(tmp_path / "run", store, _MANY, f"checkpoint.dir={folder}")
    running.until(r"^step 2/")
    to_composer(running, signal.SIGTERM)
    running.end()
    [match] = re.findall(r"the same command with (.+)$", running.output, re.MULTILINE)
    [argument] = shlex.split(match)
    [saved_step] = folder.iterdir()
    steps = f"steps={int(saved_step.name.partition('-')[2]) + 2}"
    resumed = run_job(tmp_path / "resumed", store, *_SMALL, steps, argument)
    undisturbed = run_job(tmp_path / "undisturbed", store, *_SMALL, steps)
    assert resumed.code == undisturbed.code == 0, resumed.output
    assert resumed.summary["losses"] == undisturbed.summary["losses"]


def test_a_run_that_should_not_save_says_so(tmp_path: Path, prepared: Job) -> None:
    running = Running(tmp_path / "run", prepared.folder.parent / "store", _MANY, "checkpoint.on_stop=false")
    running.until(r"^step 2/")
    to_composer(running, signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert "checkpoint.on_stop=false" in running.output
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_files_are_gone(tmp_path: Path, prepared: Job) -> None:
    store = prepared.folder.parent / "store"
    # one step that takes long enough to be cut short
    long = ("data.batch_size=32", "data.seq_len=512", "budget=4GB", "model.arguments.layers=16")
    running = Running(tmp_path / "run", store, _MANY, *long)
    running.until(r"^step 1/")
    to_composer(running, signal.SIGTERM)
    running.until("ends after this step")
    to_composer(running, signal.SIGTERM)
    assert running.end() == 128 + signal.SIGTERM
    assert "its state saved" not in running.output
    assert [*(prepared.folder.parent / "disk").iterdir()] == []
    assert "Traceback" not in running.output


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["trace", "profile", "solve"])
@pytest.mark.parametrize("delay_s", [0.05, 1.0])
def test_planning_ends_at_once_with_nothing_half_written(tmp_path: Path, stage: str, delay_s: float) -> None:
    running = Running(tmp_path / "run", tmp_path / "store", "steps=2", f"seed={int(delay_s * 100)}")
    running.until(rf"{stage}: started")
    time.sleep(delay_s)
    begin = time.monotonic()
    to_all(running, signal.SIGTERM)
    code = running.end()
    assert time.monotonic() - begin < 10
    assert code == 128 + signal.SIGTERM, running.output
    for file in (path for path in tmp_path.rglob("*.json") if path.is_file()):
        json.loads(file.read_text())
    assert list(tmp_path.rglob("*.part")) == []
    assert not (tmp_path / "disk").exists() or [*(tmp_path / "disk").iterdir()] == []


def test_no_training_outlives_a_killed_composing_process(tmp_path: Path, prepared: Job) -> None:
    running = Running(tmp_path / "run", prepared.folder.parent / "store", _MANY, "checkpoint.every=5")
    running.until(r"^step 6/")
    pids = running.pids()
    running.process.kill()
    running.end()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "step-5" in saved(tmp_path / "run")
    # the next run clears away what this one had no time for
    next_one = run_job(tmp_path / "next", prepared.folder.parent / "store", *_SMALL, "steps=1")
    assert next_one.code == 0
    assert [*(prepared.folder.parent / "disk").iterdir()] == []
