"""What the command does for a small model: files, budgets, refusals, kills."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.commands.jobs import ROOT, command, run_job
from tests.sealed import sealed

_SMALL = ("+model=mlp", "data.batch_size=2", "data.seq_len=32", "steps=3")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the module: the model is traced and profiled once."""
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def least_bytes(tmp_path_factory: pytest.TempPathFactory, store: Path) -> int:
    refused = run_job(tmp_path_factory.mktemp("refused"), store, *_SMALL, "budget=50MB")
    assert refused.code == 2, refused.output
    return refused.error["least_feasible_bytes"]


def test_a_run_leaves_every_file_of_the_contract(tmp_path: Path, store: Path) -> None:
    job = run_job(tmp_path, store, *_SMALL, "budget=2GB", f"export.final={tmp_path / 'weights'}")
    assert job.code == 0, job.output
    expected = ("summary.json", "plan.json", "timeline.json", "report.html", "losses.csv")
    assert [name for name in expected if not (tmp_path / name).exists()] == []
    assert list((tmp_path / "weights").glob("*.safetensors"))
    summary = job.summary
    assert len(summary["losses"]) == summary["steps"] == 3
    assert summary["peak_bytes"] <= summary["budget_bytes"] == 2_000_000_000
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "M"}


def test_the_named_least_budget_runs_and_three_percent_less_is_refused(
    tmp_path: Path, store: Path, least_bytes: int
) -> None:
    job = run_job(tmp_path / "least", store, *_SMALL, f"budget={least_bytes}")
    assert job.code == 0, job.output
    assert job.summary["peak_bytes"] <= least_bytes
    less = run_job(tmp_path / "less", store, *_SMALL, f"budget={int(least_bytes * 0.97)}")
    assert less.code == 2, less.output
    assert less.error["kind"] == "infeasible_budget"
    assert less.error["least_feasible_bytes"] == least_bytes
    assert "Traceback" not in less.output


def test_kill_leaves_nothing_that_the_next_run_trips_over(tmp_path: Path, store: Path) -> None:
    disk = tmp_path / "disk"
    arguments = [*_SMALL, "steps=1000", "budget=2GB", "solver=layerwise", f"tiers.disk={disk}"]
    killed = subprocess.Popen(
        command(tmp_path / "run", store, *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    for line in killed.stdout:
        if line.startswith("step 2/"):
            break
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    deadline = time.monotonic() + 30
    arguments[len(_SMALL)] = "steps=2"
    while time.monotonic() < deadline and _stage_processes(tmp_path):
        time.sleep(0.1)
    assert _stage_processes(tmp_path) == [], "a stage outlived its parent"
    job = run_job(tmp_path / "run", store, *arguments)
    assert job.code == 0, job.output
    assert list(disk.iterdir()) == [], "scratch files of the killed run are still there"


def _stage_processes(folder: Path) -> list[str]:
    """Command lines of living processes that name `folder`."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes().replace(b"\0", b" ").decode()
        except OSError:  # it ended while we looked
            continue
        if str(folder) in line and "stages." in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def filled_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    made = run_job(folder / "made", folder / "store", *_SMALL, "budget=2GB", "steps=1")
    assert made.code == 0, made.output
    return folder / "store"


@pytest.mark.parametrize(
    "damage", ["operator", "argument", "type", "number", "path", "truncated", "plan", "costs"]
)
def test_a_crafted_artifact_is_refused_and_nothing_runs(
    tmp_path: Path, filled_store: Path, damage: str
) -> None:
    own_store = tmp_path / "store"
    shutil.copytree(filled_store, own_store)
    kind = damage if damage in ("plan", "costs") else "graph"
    [file] = own_store.rglob(f"{kind}.json")
    file.write_bytes(_damaged(file.read_bytes(), damage, tmp_path / "planted"))
    disk = f"tiers.disk={filled_store.parent / 'disk'}"
    job = run_job(tmp_path / "again", own_store, *_SMALL, "budget=2GB", "steps=1", disk)
    assert job.code == 2, job.output
    assert job.error["kind"] in ("artifact", "plan")
    assert "Traceback" not in job.output
    assert "step 1/" not in job.output
    assert not (tmp_path / "planted").exists()


def _damaged(content: bytes, damage: str, planted: Path) -> bytes:
    if damage == "truncated":
        return content[: len(content) // 2]
    envelope = json.loads(content)
    graph = envelope["content"]
    if damage == "plan":
        phase = graph["phases"][0]
        phase["instructions"] = [item for item in phase["instructions"] if item["operation"] != "update"]
        return sealed(envelope)
    if damage == "costs":
        graph["regions"][0]["saved_bytes"] = -1
        return sealed(envelope)
    node = next(node for node in graph["nodes"] if node["op"].startswith("aten.linear"))
    if damage == "operator":
        node["op"] = "os.system"
        node["args"] = [f"touch {planted}"]
    elif damage == "argument":
        del node["args"][1]
    elif damage == "type":
        graph["regions"][0]["start"] = "0"
    elif damage == "number":
        graph["parameters"][0]["spec"]["shape"] = [10**30, 10**30]
    else:
        graph["initial"] = {"source": "safetensors", "folder": "/", "files": ["../etc/passwd"]}
    return sealed(envelope)
