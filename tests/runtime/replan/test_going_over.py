"""A run that goes over to another plan gives the numbers of one that keeps its plan."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.config import ExportConfig, SolverConfig
from stages.runtime.replan.watch import Handover, ReplanRequested
from stages.runtime.stage import Surroundings, run
from stages.runtime.tiers import space
from stages.solve import stage as solve
from stages.solve.replan import run_again
from tests.parity.harness import RESIDENT, Variant
from tests.runtime.sessions_on_disk import Job

LAYERWISE = Variant("layerwise", "layerwise", least=False, lane="adversarial")


def surroundings(job: Job, folder: Path) -> Surroundings:
    """As the composed job gives them, with a timeline of the resident plan."""
    _, predicted = solve.run(job.config(), job.graph, job.costs)
    folder.mkdir(parents=True)
    envelope.save(folder / "predicted.json", predicted)
    handover = Handover(folder / "state", folder / "costs.json")
    return Surroundings(folder, folder / "predicted.json", handover=handover)


@pytest.mark.parametrize(("precision", "micro_batches"), [("fp32", 1), ("fp16", 1), ("fp32", 2)])
def test_losses_and_weights_are_bitwise_those_of_an_undisturbed_run(
    tmp_path: Path, precision: str, micro_batches: int
) -> None:
    job = Job("mlp", precision, tmp_path, micro_batches=micro_batches)
    expected, weights = job.run(steps=8)
    first = surroundings(job, tmp_path / "run")
    always = SolverConfig(name="resident", replan="always")
    with pytest.raises(ReplanRequested):
        job.run(RESIDENT, first, steps=8, solver=always)
    assert first.handover is not None
    state = first.handover.state
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    found = envelope.load(first.handover.costs, Costs)
    assert found != job.costs
    # the process of the test holds far more than the made-up machine's
    found = msgspec.structs.replace(found, baseline_bytes=0)
    config = job.config(LAYERWISE, steps=8, export=ExportConfig(final=str(tmp_path / "other")))
    config = replace(config, solver=replace(config.solver, replan="always"))
    plan, predicted = run_again(config, job.graph, found, job.plan())
    assert plan.solver == "layerwise"
    envelope.save(tmp_path / "run" / "second.json", predicted)
    second = Surroundings(tmp_path / "run", tmp_path / "run" / "second.json", state=state)
    summary, _ = run(config, job.graph, found, plan, None, second)
    assert summary.losses == expected.losses
    assert summary.grad_norms == expected.grad_norms
    assert summary.skipped_steps == expected.skipped_steps
    assert summary.replanned_at is not None
    assert summary.replanned_at >= 3
    assert summary.resumed_at is None
    assert summary.original_predicted_step_time_s == expected.predicted_step_time_s
    assert summary.predicted_step_time_s == plan.prediction.step_ns / 1e9
    assert len(summary.step_peak_bytes) == 8
    assert not state.exists(), "its space is wanted again"
    [file] = (tmp_path / "other").glob("*.safetensors")
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor, weights[name]), name


def test_never_watches_nothing(tmp_path: Path) -> None:
    job = Job("mlp", "fp32", tmp_path)
    summary, _ = job.run(
        RESIDENT,
        surroundings(job, tmp_path / "run"),
        steps=4,
        solver=SolverConfig(name="resident", replan="never"),
    )
    assert summary.replanned_at is None
    assert not (tmp_path / "run" / "state").exists()


def test_alone_it_says_what_it_found_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job("mlp", "fp32", tmp_path)
    alone = replace(surroundings(job, tmp_path / "run"), handover=None)
    summary, _ = job.run(RESIDENT, alone, steps=4)
    assert len(summary.losses) == 4
    # the test's process holds more than the made-up machine's, so memory is off
    assert "replan: after step 3" in capsys.readouterr().out


def test_without_room_for_the_state_the_plan_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job("mlp", "fp32", tmp_path)
    given = surroundings(job, tmp_path / "run")
    monkeypatch.setattr(space, "free_bytes", lambda folder: 1000)
    summary, _ = job.run(RESIDENT, given, steps=4, solver=SolverConfig(name="resident", replan="always"))
    assert len(summary.losses) == 4
    assert "training goes on with the same plan" in capsys.readouterr().out
