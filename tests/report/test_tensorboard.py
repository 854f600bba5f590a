"""What a run reports becomes events, each once, while its files grow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import pytest

from stages import preconditions
from stages.artifacts.errors import ConfigError
from stages.artifacts.losses import EVALUATIONS_HEADER, LOSSES_HEADER, evaluations_line, losses_line
from stages.config import DataConfig, EvalConfig, RunConfig
from stages.report.tensorboard import Follower, write_events


def test_each_step_comes_once_and_half_a_line_waits(tmp_path: Path) -> None:
    follower, losses = Follower(tmp_path), tmp_path / "losses.csv"
    assert list(follower.new()) == []
    first = LOSSES_HEADER + losses_line(1, 2.5, None, 0.25, 7, skipped=False)
    losses.write_text(first + "2,1.")
    [(step, numbers)] = follower.new()
    assert (step, numbers["loss"], numbers["step_time_s"], numbers["peak_bytes"]) == (1, 2.5, 0.25, 7.0)
    assert "grad_norm" not in numbers
    losses.write_text(first + losses_line(2, math.nan, 0.5, 0.25, 7, skipped=True))
    (tmp_path / "evaluations.csv").write_text(EVALUATIONS_HEADER + evaluations_line(2, 3.5))
    (step, numbers), evaluation = follower.new()
    assert step == 2
    assert math.isnan(numbers["loss"])
    assert evaluation == (2, {"evaluation/loss": 3.5})
    assert list(follower.new()) == []


@dataclass
class Value:
    tag: str
    simple_value: float


@dataclass
class Summary:
    value: list[Value]
    Value = Value


@dataclass
class Event:
    wall_time: float
    step: int
    summary: Summary


class Writer:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.flushed = 0

    def add_event(self, event: Event) -> None:
        self.events.append(event)

    def flush(self) -> None:
        self.flushed += 1


def test_events_carry_step_and_tags_and_are_flushed(tmp_path: Path) -> None:
    line = losses_line(1, 2.5, 0.5, 0.25, 7, skipped=False)
    (tmp_path / "losses.csv").write_text(LOSSES_HEADER + line)
    writer = Writer()
    write_events(Follower(tmp_path), writer, Event, Summary)
    [event] = writer.events
    assert event.step == 1
    assert Value("loss", 2.5) in event.summary.value
    assert writer.flushed == 1


def test_without_the_package_it_is_refused_before_work_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "find_spec", lambda name: None)
    preconditions.require_log(RunConfig(budget="1GB"))
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        preconditions.require_log(RunConfig(budget="1GB", log="tensorboard"))


def test_evaluation_data_that_nothing_reads_is_refused() -> None:
    given = EvalConfig(every=2, path="held-out.npy")
    config = RunConfig(budget="1GB", data=DataConfig(name="random"), eval=given)
    with pytest.raises(ConfigError, match="data=random reads no files"):
        preconditions.require_evaluation_data(config)
    config = RunConfig(budget="1GB", data=DataConfig(name="text"), eval=EvalConfig(path="held-out.txt"))
    with pytest.raises(ConfigError, match=r"eval\.every is 0"):
        preconditions.require_evaluation_data(config)
