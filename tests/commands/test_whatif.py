"""Plans for hardware that is not here, as a user asks for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ancestor import BUDGET, MODELS, results
from stages.config import parse_size
from tests.commands.jobs import ROOT

GB = 10**9
#: a two-layer GPT-2 that is traced in seconds
SMALL = (
    "model=gpt2", "model.arguments.n_layer=2", "model.arguments.n_embd=256", "model.arguments.n_head=4",
    "data.batch_size=2", "data.seq_len=64",
)  # fmt: skip


def what_if(folder: Path, *overrides: str, module: str = "stages.solve") -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        module,
        *overrides,
        f"hydra.run.dir={folder}",
        f"store={folder.parent / 'store'}",
    ]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def test_a_plan_for_another_machine_needs_nothing_before_and_says_what_it_takes(tmp_path: Path) -> None:
    finished = what_if(tmp_path / "run", *SMALL, "hardware=laptop", "budget=400MB")
    assert finished.returncode == 0, finished.stderr
    forecast = read(tmp_path / "run", "forecast.json")
    assert (forecast["hardware"], forecast["device"], forecast["precision"]) == ("laptop", "cuda", "fp32")
    assert 0 < forecast["predicted_peak_bytes"] <= forecast["budget_bytes"] == 400 * 10**6
    assert forecast["least_feasible_bytes"] <= forecast["budget_bytes"]
    assert forecast["tokens_per_s"] == pytest.approx(2 * 64 / forecast["predicted_step_time_s"])
    assert forecast["predicted_step_time_s"] >= forecast["compute_time_s"] > 0
    assert set(forecast["moved_bytes_per_step"]) == {"upload", "download", "disk_read", "disk_write"}
    assert forecast["disk_bytes"] == 0 < forecast["host_bytes"] < 16 * GB
    for words in ("tokens per second", "host memory", "least feasible budget", "moved per step"):
        assert words in finished.stdout
    costs = read(tmp_path / "run", "costs.json")["content"]
    assert (costs["source"], costs["device"]) == ("roofline", "cuda")


def test_the_same_question_is_answered_from_the_store(tmp_path: Path) -> None:
    question = (*SMALL, "hardware=laptop", "budget=400MB")
    what_if(tmp_path / "first", *question)
    again = what_if(tmp_path / "second", *question)
    assert again.returncode == 0
    assert "roofline: unchanged" in again.stdout
    assert "solve: unchanged" in again.stdout
    assert read(tmp_path / "first", "forecast.json") == read(tmp_path / "second", "forecast.json")


def test_training_on_it_is_refused(tmp_path: Path) -> None:
    finished = what_if(tmp_path / "run", *SMALL, "hardware=laptop", "budget=400MB", module="stages.run")
    assert finished.returncode == 2
    assert "python -m stages.solve" in finished.stderr
    assert read(tmp_path / "run", "error.json")["key"] == "hardware"


@pytest.mark.slow
def test_eight_billion_parameters_on_a_desktop_card(tmp_path: Path) -> None:
    question = ("+model=llama3-8b", "hardware=rtx4090", "budget=24GB", "precision=bf16")
    finished = what_if(tmp_path / "run", *question)
    assert finished.returncode == 0, finished.stderr
    forecast = read(tmp_path / "run", "forecast.json")
    assert forecast["parameters"] == 8_030_261_248
    # 14 bytes of training state per parameter, not all of which the card holds
    beyond = 14 * forecast["parameters"] - 24 * GB
    assert forecast["host_bytes"] + forecast["disk_bytes"] > beyond
    assert forecast["host_bytes"] <= 64 * GB


@pytest.mark.slow
def test_seventy_billion_parameters_are_planned_in_little_memory(tmp_path: Path) -> None:
    question = ("+model=llama3-70b", "hardware=h100", "budget=80GB", "precision=bf16")
    finished = what_if(tmp_path / "run", *question)
    assert finished.returncode == 0, finished.stderr
    assert read(tmp_path / "run", "forecast.json")["parameters"] == 70_553_706_496
    for kind in ("graph", "costs", "plan"):
        assert read(tmp_path / "run", f"{kind}.json")["provenance"]["peak_bytes"] < 2 * GB
    small = ("tiers.host_budget=32GB", "tiers.disk_budget=100GB")
    refused = what_if(tmp_path / "small", *question, *small)
    assert refused.returncode == 2
    error = read(tmp_path / "small", "error.json")
    assert (error["kind"], error["key"]) == ("infeasible_budget", "tiers.disk_budget")
    assert "host memory" in error["message"]
    assert "on disk" in error["message"]
    assert str(32 * GB) in error["message"]
    assert str(100 * GB) in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODELS))
def test_the_ancestors_solver_test(model: str) -> None:
    budget = parse_size(BUDGET, "budget")
    found = {result.solver: result for result in results(model)}
    for solver, result in found.items():
        if solver == "resident":  # gives nothing up: the model alone is larger
            assert result.step_s is None
            assert result.least_feasible_bytes > budget
        else:
            assert result.peak_bytes is not None, solver
            assert result.peak_bytes <= budget, solver
    steps = [found[solver].step_s for solver in ("greedy_sync", "greedy_async", "auto") if solver in found]
    assert all(step is not None for step in steps)
    assert steps == sorted(steps, reverse=True)  # type: ignore[type-var]
