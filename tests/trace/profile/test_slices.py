"""Where the solver may cut the batch, no slice is measured that bursts the budget."""

from __future__ import annotations

import dataclasses

import pytest

from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.slicing import costs_of_slice
from stages.config import RunConfig, SolverConfig
from stages.region import memory
from stages.solve import stage as solve
from stages.trace import stage as trace
from stages.trace.profile import rounds, stage
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.regions import measure_region
from stages.trace.profile.stand_ins import representative_cases
from tests.models_for_tests import BY_NAME
from tests.parity.harness import config_of
from tests.trace.profile.hand_graph import mlp_graph


@pytest.fixture(scope="module")
def config() -> RunConfig:
    given = config_of(BY_NAME["gpt2"], "fp32", rows=8)
    return dataclasses.replace(given, solver=SolverConfig("auto", micro_batches="auto", time_limit_s=1.0))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_TIMING_S", 0.1)
    monkeypatch.setattr(stage, "_LINKS_S", 0.5)


@pytest.mark.usefixtures("quick")
def test_with_room_all_are_measured_and_each_knows_what_measuring_it_took(config: RunConfig) -> None:
    costs = stage.run(dataclasses.replace(config, budget="100GB"), trace.run(config))
    assert costs.micro_batches == 1
    assert [item.micro_batches for item in costs.slices] == [2, 4, 8]
    peaks = [costs_of_slice(costs, number).stage_peak_bytes["profile"] for number in (8, 4, 2, 1)]
    assert peaks == sorted(peaks)
    assert peaks[:3] == [item.profile_peak_bytes for item in reversed(costs.slices)]


@pytest.mark.usefixtures("quick")
def test_without_room_only_the_smallest_slices_are_measured(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    graph = trace.run(config)
    tiny = dataclasses.replace(config, budget="1MB")
    costs = stage.run(tiny, graph)
    assert (costs.micro_batches, costs.slices) == (8, [])
    assert "slices of 2 rows and larger are left out" in capsys.readouterr().out
    with pytest.raises(InfeasibleBudgetError) as refusal:
        solve.run(tiny, graph, costs)
    enough = dataclasses.replace(config, budget=str(refusal.value.least_feasible_bytes))
    assert solve.run(enough, graph, costs)[0].placement.micro_batches == 8


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_twice_the_rows_take_is_foreseen(rows: int) -> None:
    memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES)  # as the stage does before it measures

    def measured(rows: int) -> tuple:
        graph = mlp_graph(rows)
        cases = representative_cases(graph)
        return graph, cases, [measure_region(graph, case, PeakGauge()) for case in cases.values()]

    graph, _, costs = measured(rows)
    foreseen = rounds.bytes_of_twice_the_rows(graph, costs)
    members = rounds._members(*measured(2 * rows))
    assert foreseen == pytest.approx(max(item.held_bytes + item.peak_bytes for item in members), rel=0.1)
