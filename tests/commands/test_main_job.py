"""The main job's promises, on GPT-2: minutes each, so on request (`nox -s slow`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.jobs import ROOT, run_job, run_job_limited, write_tokens

pytestmark = pytest.mark.slow

SOLVERS = ("resident", "layerwise", "greedy_sync", "greedy_async")


def _assert_predicted(summary: dict[str, Any]) -> None:
    """Predicted peak within 10% of the measured one, and never under it by more than 3%."""
    measured = summary["peak_bytes_by_stage"]["runtime"]
    assert 0.97 * measured <= summary["predicted_peak_bytes"] <= 1.10 * measured


def test_gpt2_learns_inside_8_gb(tmp_path: Path) -> None:
    job = run_job(tmp_path, tmp_path / "store", "+model=gpt2", "budget=8GB")
    assert job.code == 0, job.output
    losses = job.summary["losses"]
    assert mean(losses[-5:]) <= losses[0] - 2.0
    assert job.summary["peak_bytes"] <= 8 * 10**9
    _assert_predicted(job.summary)


#: what in-memory training needs 3.2 GB for, and 22 GB of training state
_TIGHT = {
    "gpt2": ("budget=1200MB", "precision=fp32", "data.batch_size=1", "data.seq_len=512", "steps=6"),
    "gpt2-xl": ("budget=1500MB", "precision=bf16", "data.batch_size=1", "data.seq_len=256", "steps=2"),
}


@pytest.mark.cgroup
@pytest.mark.parametrize(("model", "limit_bytes"), [("gpt2", 1_200_000_000), ("gpt2-xl", 1_500_000_000)])
def test_the_whole_job_lives_in_a_cgroup_of_the_budget(tmp_path: Path, model: str, limit_bytes: int) -> None:
    store = tmp_path / "store"
    job, limited = run_job_limited(tmp_path, store, limit_bytes, f"+model={model}", *_TIGHT[model])
    assert job.code == 0, job.output
    assert limited.killed == 0
    assert job.summary["peak_bytes"] <= limit_bytes
    _assert_predicted(job.summary)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """GPT-2 124M with dropout, five steps of the plain loop."""
    folder = tmp_path_factory.mktemp("reference")
    tokens = write_tokens(folder / "tokens.npy", rows=10, seq_len=64, vocabulary=50257)
    line = [sys.executable, "-m", "tests.reference", "--model", "gpt2", "--batch-size", "2"]
    line += ["--seq-len", "64", "--steps", "5", "--tokens", str(tokens), "--export", str(folder / "out")]
    subprocess.run(line, cwd=ROOT, check=True)
    [weights] = (folder / "out").glob("*.safetensors")
    losses = json.loads(next((folder / "out").glob("*.json")).read_text())["losses"]
    return {"tokens": tokens, "weights": load_file(weights), "losses": losses, "store": folder / "store"}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("budget", ["8GB", "least"])
def test_every_solver_gives_the_numbers_of_the_plain_loop(
    tmp_path: Path, reference: dict[str, Any], solver: str, budget: str
) -> None:
    overrides = [
        "+model=gpt2", f"solver={solver}", "data=tokens", f"data.path={reference['tokens']}", "steps=5",
        "data.batch_size=2", "data.seq_len=64", "optimizer.lr=1e-3", "optimizer.weight_decay=0.01",
    ]  # fmt: skip
    store = reference["store"]
    if budget == "least":
        refused = run_job(tmp_path / "refused", store, *overrides, "budget=100MB")
        assert refused.code == 2, refused.output
        budget = str(refused.error["least_feasible_bytes"])
    final = tmp_path / "weights"
    job = run_job(tmp_path / "run", store, *overrides, f"budget={budget}", f"export.final={final}")
    assert job.code == 0, job.output
    assert job.summary["losses"] == reference["losses"]
    assert job.summary["peak_bytes"] <= job.summary["budget_bytes"]
    _assert_predicted(job.summary)
    [file] = final.glob("*.safetensors")
    assert_same_weights(load_file(file), reference["weights"])


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal but for which name of the tied pair each file has."""
    tied = {"transformer.wte.weight", "lm_head.weight"}
    assert set(found) - tied == set(expected) - tied
    for name, tensor in found.items():
        [partner] = (tied & set(expected)) if name in tied else {name}
        assert torch.equal(tensor, expected[partner]), name


def test_a_budget_too_small_for_gpt2_names_one_that_works(tmp_path: Path) -> None:
    store = tmp_path / "store"
    refused = run_job(tmp_path / "refused", store, "+model=gpt2", "budget=200MB", "steps=1")
    assert refused.code == 2, refused.output
    least = refused.error["least_feasible_bytes"]
    job = run_job(tmp_path / "least", store, "+model=gpt2", f"budget={least}", "steps=1")
    assert job.code == 0, job.output
    assert job.summary["peak_bytes"] <= least
    less = run_job(tmp_path / "less", store, "+model=gpt2", f"budget={int(0.97 * least)}", "steps=1")
    assert less.code == 2, less.output
