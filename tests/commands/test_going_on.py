"""The command on a small model: going over to another plan, resuming, being ended in between."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands.jobs import ROOT, Job, command, run_job
from tests.sealed import sealed

_SMALL = ("+model=mlp", "+model.arguments.dropout=0.1", "data.batch_size=2", "data.seq_len=32", "steps=6")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """All in memory; its store serves the module."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = run_job(
        folder / "run",
        folder / "store",
        *_SMALL,
        "budget=2GB",
        "solver.replan=never",
        f"export.final={folder / 'final'}",
    )
    assert job.code == 0, job.output
    return job


def assert_same(job: Job, final: Path, undisturbed: Job) -> None:
    assert job.summary["losses"] == undisturbed.summary["losses"]
    [file], [expected] = (
        [*folder.glob("*.safetensors")] for folder in (final, undisturbed.folder.parent / "final")
    )
    weights = load_file(file)
    for name, tensor in load_file(expected).items():
        assert torch.equal(weights[name], tensor), name


def test_a_plan_that_takes_more_memory_than_predicted_is_replaced(tmp_path: Path, undisturbed: Job) -> None:
    """Costs that promise 30 MB too much room: everything stays in memory until the first steps tell."""
    store = tmp_path / "store"
    shutil.copytree(undisturbed.folder.parent / "store", store)
    [file] = store.rglob("costs.json")
    record = json.loads(file.read_text())
    record["content"]["baseline_bytes"] -= 30 * 10**6
    record["content"]["stage_peak_bytes"] = {}  # the profile takes more than this training
    file.write_bytes(sealed(record))
    budget = undisturbed.summary["predicted_peak_bytes"]
    disk, final = undisturbed.folder.parent / "disk", tmp_path / "final"
    job = run_job(
        tmp_path / "run", store, *_SMALL, f"budget={budget}", f"tiers.disk={disk}", f"export.final={final}"
    )
    assert job.code == 0, job.output
    assert "replan: after step 3" in job.output
    summary = job.summary
    assert summary["replanned_at"] == 3
    assert summary["predicted_peak_bytes"] > summary["original_predicted_peak_bytes"]
    assert summary["moved_bytes_per_step"]["disk_read"] > 0
    assert max(summary["step_peak_bytes"][3:]) < min(summary["step_peak_bytes"][:3])
    assert max(summary["step_peak_bytes"][3:]) <= budget
    assert_same(job, final, undisturbed)
    assert list(disk.iterdir()) == []


def test_a_run_that_is_ended_after_it_went_over_leaves_no_state(tmp_path: Path, undisturbed: Job) -> None:
    folder = undisturbed.folder.parent
    arguments = [*_SMALL, "steps=10000", "budget=2GB", "solver.replan=always"]
    running = subprocess.Popen(
        command(tmp_path / "run", folder / "store", *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    state = []
    for line in running.stdout:
        if "solve: again" in line:
            state = [*(folder / "disk").glob("*/state/checkpoint.json")]
        if line.startswith("step 5/"):
            break
    assert len(state) == 1
    running.send_signal(signal.SIGTERM)
    running.stdout.read()
    assert running.wait(timeout=30) == 128 + signal.SIGTERM
    running.stdout.close()
    assert list((folder / "disk").iterdir()) == []
