"""Case 19: saved at step 3, resumed under another budget and solver. The new plan's placement, its budget
kept while loading too, and the numbers of the run that was not interrupted."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.commands.jobs import run_job

_JOB = ("+model=mlp", "+model.arguments.dropout=0.1", "data.batch_size=2", "data.seq_len=32", "steps=6")


def test_resumed_under_the_least_budget_of_another_solver(tmp_path: Path) -> None:
    store = tmp_path / "store"
    finals = [tmp_path / name for name in ("undisturbed", "resumed")]
    saving = ("budget=2GB", "checkpoint.every=3", "checkpoint.keep=2", f"export.final={finals[0]}")
    undisturbed = run_job(tmp_path / "first", store, *_JOB, *saving)
    assert undisturbed.code == 0, undisturbed.output
    assert undisturbed.summary["placement"]["weights"].keys() == {"resident"}
    checkpoint = tmp_path / "first" / "checkpoints" / "step-3"
    arguments = [*_JOB, "solver=layerwise", f"resume={checkpoint}"]
    refused = run_job(tmp_path / "refused", store, *arguments, "budget=50MB")
    budget = refused.error["least_feasible_bytes"]
    resumed = run_job(tmp_path / "second", store, *arguments, f"budget={budget}", f"export.final={finals[1]}")
    assert resumed.code == 0, resumed.output
    summary = resumed.summary
    assert summary["resumed_at"] == 3
    assert summary["placement"]["weights"]["streamed"] >= 6
    assert summary["peak_bytes"] <= budget
    assert summary["losses"] == undisturbed.summary["losses"]
    [expected], [found] = ([*folder.glob("*.safetensors")] for folder in finals)
    weights = load_file(found)
    for name, tensor in load_file(expected).items():
        assert torch.equal(weights[name], tensor), name
