"""The pipeline: order of stages, what is reused, what a stage alone needs, how failures end."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from stages import run
from stages.artifacts import envelope
from stages.artifacts.store import key_of
from stages.artifacts.timeline import Timeline
from stages.config import (
    DataConfig,
    DeviceConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SolverConfig,
    TiersConfig,
    save_composed,
)
from stages.process import REPLAN


class Children:
    """Stands for the stage processes: notes which ran, writes what they were told to write."""

    def __init__(self, codes: dict[str, int] | None = None) -> None:
        self.started: list[str] = []
        self.inputs: dict[str, list[str]] = {}
        self._codes = codes or {}
        #: exit codes of a stage's first processes, before those of `codes`
        self.first_codes: dict[str, list[int]] = {}

    def __call__(self, command: Sequence[str], environment: dict[str, str], *, finishes: bool = False) -> int:
        module = command[2]
        stage = next(stage for stage, name in run.MODULES.items() if name == module)
        self.started.append(stage)
        first = self.first_codes.get(stage, [])
        code = first.pop(0) if first else self._codes.get(stage, 0)
        flags = list(itertools.pairwise(command))
        self.inputs[stage] = [value.partition("=")[0] for flag, value in flags if flag == "--in"]
        for flag, value in flags:
            if flag == "--out" and code in (0, REPLAN):
                path = Path(value.partition("=")[2])
                envelope.save(path, Timeline(key_of({"stage": stage}), 0, []))
        return code


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return use(monkeypatch, Children())


def use(monkeypatch: pytest.MonkeyPatch, children: Children) -> Children:
    monkeypatch.setattr(run, "run_child", children)
    return children


def start(folder: Path, only: str = "", **changes: str) -> int:
    config = RunConfig(
        model=ModelConfig(name="m", source="transformers"),
        data=DataConfig(name=changes.pop("data", "text"), path=changes.pop("path", "")),
        optimizer=OptimizerConfig(name="adamw"),
        solver=SolverConfig(name=changes.pop("solver", "resident"), replan=changes.pop("replan", "auto")),
        tiers=TiersConfig(disk=str(folder / "disk"), host_budget=changes.pop("host_budget", "")),
        device=DeviceConfig(name=changes.pop("device", "cpu")),
        **{"budget": "1GB", "store": str(folder / "store"), **changes},
    )
    file = folder / "config.json"
    save_composed(config, file)
    line = ["--composed", str(file), "--run-dir", str(folder / "out")]
    return run.run_composed([*line, "--only", only] if only else line)


def test_all_stages_run_once_in_order_each_with_what_came_before(tmp_path: Path, children: Children) -> None:
    assert start(tmp_path) == 0
    assert children.started == ["trace", "profile", "solve", "runtime", "report"]
    assert children.inputs["profile"] == ["graph"]
    assert children.inputs["solve"] == ["graph", "costs"]
    assert children.inputs["runtime"] == ["graph", "costs", "plan", "predicted"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"graph.json", "costs.json", "plan.json"}


def test_the_curve_plans_all_budgets_and_trains_nothing(tmp_path: Path, children: Children) -> None:
    assert start(tmp_path, budget="curve", only="solve") == 0
    assert children.started == ["trace", "profile", "curve", "curve table"]
    assert children.inputs["curve"] == ["graph", "costs"]


def test_the_same_command_again_trains_again_and_reuses_the_rest_and_says_so(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path)
    children.started.clear()
    start(tmp_path)
    assert children.started == ["solve", "runtime", "report"]
    assert "plan" in children.inputs["solve"], "a plan from the store is verified, not made"
    said = capsys.readouterr().out
    assert all(f"{stage}: unchanged" in said for stage in ("trace", "profile", "solve"))


@pytest.mark.parametrize(
    ("change", "again"),
    [({"budget": "2GB"}, ["solve"]), ({"solver": "layerwise"}, ["solve"]), ({"precision": "bf16"}, None)],
)
def test_a_change_runs_the_stages_that_depend_on_it(
    tmp_path: Path, children: Children, change: dict[str, str], again: list[str] | None
) -> None:
    start(tmp_path)
    children.started.clear()
    start(tmp_path, **change)
    assert children.started == [*(again or ["trace", "profile", "solve"]), "runtime", "report"]


def test_each_stage_runs_alone_after_the_one_before(tmp_path: Path, children: Children) -> None:
    for stage in ("trace", "profile", "solve"):
        assert start(tmp_path, only=stage) == 0
    assert children.started == ["trace", "profile", "solve"]
    assert start(tmp_path, only="runtime") == 0
    assert children.started[3:] == ["solve", "runtime", "report"]  # the plan is verified


@pytest.mark.parametrize(
    ("stage", "first"),
    [("profile", "stages.trace"), ("solve", "stages.trace"), ("runtime", "stages.trace")],
)
def test_a_stage_alone_without_its_predecessor_says_which_to_run(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str], stage: str, first: str
) -> None:
    assert start(tmp_path, only=stage) == 2
    assert children.started == []
    assert f"python -m {first}" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "error.json").read_text())["kind"] == "artifact"


def test_a_refusal_ends_the_run_with_2_and_says_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children = use(monkeypatch, Children({"solve": 2}))
    assert start(tmp_path) == 2
    assert children.started == ["trace", "profile", "solve"]
    assert capsys.readouterr().err == ""


def test_a_killed_stage_is_reported_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Children({"runtime": -9}))
    assert start(tmp_path) == 137
    assert "SIGKILL" in capsys.readouterr().err
    assert json.loads((tmp_path / "out" / "error.json").read_text())["kind"] == "killed"


def test_an_old_error_does_not_outlive_a_run_that_succeeds(tmp_path: Path, children: Children) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "error.json").write_text("{}")
    start(tmp_path)
    assert not (tmp_path / "out" / "error.json").exists()


def test_a_device_without_a_lane_is_refused_not_replaced(tmp_path: Path, children: Children) -> None:
    assert start(tmp_path, device="cuda") == 2
    assert json.loads((tmp_path / "out" / "error.json").read_text())["key"] == "device"
    assert children.started == []


def test_a_run_off_its_prediction_is_solved_again_and_goes_on(tmp_path: Path, children: Children) -> None:
    children.first_codes["runtime"] = [REPLAN]
    assert start(tmp_path) == 0
    assert children.started == ["trace", "profile", "solve", "runtime", "solve", "runtime", "report"]
    assert children.inputs["solve"] == ["graph", "costs", "previous"]
    assert children.inputs["runtime"] == ["graph", "costs", "plan", "predicted", "state"]
    out = tmp_path / "out"
    assert (out / "plan.json").read_bytes() == (out / "replanned" / "plan.json").read_bytes()
    assert list((tmp_path / "disk").iterdir()) == []


def test_it_is_solved_again_once_only(
    tmp_path: Path, children: Children, capsys: pytest.CaptureFixture[str]
) -> None:
    children.first_codes["runtime"] = [REPLAN, REPLAN]
    assert start(tmp_path) == REPLAN
    assert children.started.count("solve") == 2
    assert "runtime stage failed" in capsys.readouterr().err
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("how", ["never", "alone"])
def test_a_run_that_may_not_be_solved_again_is_told_so(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lines: list[str] = []

    def run_child(command: Sequence[str], environment: dict[str, str], *, finishes: bool = False) -> int:
        if "stages.runtime" in command:
            lines.extend(command)
        return children(command, environment)

    assert start(tmp_path) == 0
    monkeypatch.setattr(run, "run_child", run_child)
    if how == "never":
        assert start(tmp_path, replan="never") == 0
    else:
        assert start(tmp_path, only="runtime") == 0
    assert "--in" in lines
    assert "--out" not in lines


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"data": "tokens", "path": "missing.npy"}, "data.path"),
        ({"path": "missing"}, "data.path"),
        ({"host_budget": "1GB"}, "tiers.host_budget"),
        ({"resume": "missing"}, "resume"),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_stage(
    tmp_path: Path, children: Children, changes: dict[str, str], key: str
) -> None:
    assert start(tmp_path, **changes) == 2
    assert children.started == []
    assert json.loads((tmp_path / "out" / "error.json").read_text())["key"] == key


def test_planning_alone_needs_no_data(tmp_path: Path, children: Children) -> None:
    assert start(tmp_path, only="trace", path="missing") == 0
