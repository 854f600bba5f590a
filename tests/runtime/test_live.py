"""The lines that a run leaves and shows while it trains."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from stages.artifacts.errors import StorageError
from stages.config import CheckpointConfig
from stages.report.files import losses_csv
from stages.runtime import progress
from stages.runtime.engine import StepResult
from stages.runtime.live import LiveFiles
from stages.runtime.loop import History
from stages.runtime.progress import Progress
from stages.runtime.stage import Surroundings
from tests.runtime.sessions_on_disk import Job

RESULT = StepResult(0.1, 0.5, skipped=False)


def history(*losses: float) -> History:
    steps = len(losses)
    return History(
        losses=list(losses),
        grad_norms=[None] * steps,
        skipped_steps=[2],
        step_times_s=[0.25] * steps,
        step_peak_bytes=[7] * steps,
    )


def test_each_step_is_on_the_disk_before_the_next_begins(tmp_path: Path) -> None:
    growing = history(0.1, math.nan)
    with LiveFiles(tmp_path, growing, evaluates=True) as live:
        growing.losses.append(1 / 3)
        growing.grad_norms.append(0.7)
        growing.step_times_s.append(0.5)
        growing.step_peak_bytes.append(9)
        growing.evaluations.append({"step": 3.0, "loss": 2.5})
        live(3, RESULT)
        lines = (tmp_path / "losses.csv").read_text().splitlines()
        ends = ["1,0.1,,0,0.25,7,,", "2,nan,,1,0.25,7,,", "3,0.3333333333333333,0.7,0,0.5,9,,"]
        assert lines[1:] == ends
        assert (tmp_path / "evaluations.csv").read_text() == "step,loss\n3,2.5\n"


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*losses\.csv"):
        LiveFiles(tmp_path / "file", history(), evaluates=False)


def test_what_is_written_live_is_what_the_report_writes(tmp_path: Path) -> None:
    """Also where a run goes on in another folder."""
    job = Job("mlp", "fp32", tmp_path)
    job.run(surroundings=Surroundings(tmp_path), steps=2, checkpoint=CheckpointConfig(every=2))
    (tmp_path / "second").mkdir()
    second = Surroundings(tmp_path / "second")
    summary, _ = job.run(surroundings=second, steps=3, resume=str(tmp_path / "checkpoints"))
    assert (tmp_path / "second" / "losses.csv").read_text() == losses_csv(summary)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


def shown(step: int) -> Progress:
    return Progress(step, 4, 2.0, 0.5, 300.0, 100, 10**9, 2 * 10**9, skipped=False)


def test_plain_output_gets_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    progress.show(shown(1))
    said = capsys.readouterr().out
    assert said.startswith(
        "step 1/4  loss 2.0000  0.50 s  200 tokens/s  memory 1000.0MB of 2000.0MB  5 min left, ends "
    )
    assert said.count("\n") == 1


def test_a_terminal_has_one_line_that_changes_and_messages_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("os.get_terminal_size", lambda _: type("Size", (), {"columns": 60}))
    progress.show(shown(1))
    progress.say("checkpoint")
    progress.show(shown(4))
    clear = "\r\x1b[2K"
    begin, first, message, last = terminal.getvalue().split(clear)
    assert begin == ""
    assert message == "checkpoint\n"
    assert first.startswith("[#####...............] step 1/4")
    assert last.startswith("[####################] step 4/4")
    assert last.endswith("\n")
    assert len(first) == 59
