"""The stage as a whole, on a small graph."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.errors import InfeasibleBudgetError
from stages.config import DeviceConfig, OptimizerConfig, RunConfig, TiersConfig
from stages.region import memory
from stages.room import available_bytes
from stages.trace.profile import stage
from tests.trace.profile.hand_graph import mlp_graph


def _config(disk: Path) -> RunConfig:
    return RunConfig(
        device=DeviceConfig(name="cpu"),
        optimizer=OptimizerConfig(name="adamw"),
        tiers=TiersConfig(disk=str(disk)),
    )


@dataclass
class Run:
    costs: Costs
    printed: str
    kept_random_state: bool
    folder: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The stage on a graph of three regions of two kinds, with a disk folder that is not there yet."""
    folder = tmp_path_factory.mktemp("disk")
    before = torch.get_rng_state()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        costs = stage.run(_config(folder / "later" / "scratch"), mlp_graph(rows=16))
    return Run(costs, printed.getvalue(), torch.equal(torch.get_rng_state(), before), folder)


def test_costs_are_complete(finished: Run) -> None:
    costs = finished.costs
    assert [cost.kind for cost in costs.regions] == [0, 1]
    assert sorted(costs.optimizer.states) == ["w0", "w1", "w2", "w3"]
    assert {link.name for link in costs.links} == {"disk_read", "disk_write"}
    assert costs.threads == torch.get_num_threads()


def test_the_baseline_is_a_process_with_torch_and_no_tensor(finished: Run) -> None:
    assert 100e6 < finished.costs.baseline_bytes < memory.resident_bytes() + 100e6
    assert finished.costs.stage_peak_bytes["profile"] >= memory.resident_bytes() // 2


def test_nothing_stays_behind(finished: Run) -> None:
    assert finished.kept_random_state
    assert list(finished.folder.iterdir()) == []


def test_each_kind_is_measured_once_however_many_regions_there_are(finished: Run) -> None:
    assert finished.printed.count("profile: kind") == 2  # of three regions


def test_a_region_larger_than_the_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    rows = 2 * available_bytes() // 4096
    with pytest.raises(InfeasibleBudgetError, match="second") as refusal:
        stage.run(_config(tmp_path), mlp_graph(rows=rows))
    least = refusal.value.least_feasible_bytes
    assert least is not None
    assert least > 2 * available_bytes()


def test_measuring_loads_neither_the_compiler_nor_transformers() -> None:
    code = (
        "import sys\n"
        "from stages.config import DeviceConfig, OptimizerConfig, RunConfig\n"
        "from stages.trace.profile import stage\n"
        "from tests.trace.profile.hand_graph import mlp_graph\n"
        "config = RunConfig(device=DeviceConfig(name='cpu'), optimizer=OptimizerConfig(name='adamw'))\n"
        "stage.run(config, mlp_graph(rows=16))\n"
        "heavy = ('sympy', 'torch._dynamo', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.splitlines()[-1] == "[]"


def test_room_is_what_the_system_or_the_cgroup_leaves() -> None:
    assert 0 < available_bytes() < 1 << 50


def test_stand_in_process_reports_what_went_wrong() -> None:
    broken = g.RegionGraph(
        model="hand", mode="train", precision="fp32", symbols={}, inputs=[], outputs=[], loss="loss",
        nodes=[g.Node("x", "aten.no_such_operator.default")],
        regions=[g.Region("r", 0, 0, 1, [], [], [])], values=[], parameters=[], initial=g.Initial("live"),
    )  # fmt: skip
    order = stage.Order(broken, OptimizerConfig(name="adamw"), "fp32", 1)
    with pytest.raises(RuntimeError, match="no_such_operator"):
        stage.measure_training_process(order)


def test_a_busy_machine_is_told_of_and_a_quiet_one_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    stage.say_if_disturbed(0.01)
    assert capsys.readouterr().out == ""
    stage.say_if_disturbed(0.43)
    assert "43%" in capsys.readouterr().out
