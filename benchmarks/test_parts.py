"""Speed of the parts that a step is made of, and of small whole steps: `nox -s bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stages
from stages.artifacts.plan import Instruction, Placement
from stages.config import OptimizerConfig
from stages.optim.make import make_kernel
from stages.runtime.lanes.lane_set import LaneSet
from stages.runtime.tiers.disk import DiskFile
from stages.solve.build import build_problem
from stages.solve.lowering.lower import lower
from stages.solve.problem import Problem
from stages.solve.simulator import simulate
from tests.models_for_tests import BY_NAME
from tests.solve.planning import plan_of
from tests.solve.synthetic import chain, placement

_ELEMENTS = 1 << 22
_BYTES = 64 << 20
_ROWS = 4


# kernels and lanes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_update_of_one_chunk(benchmark: Any, precision: str) -> None:
    kernel = make_kernel("adamw", OptimizerConfig(name="adamw"), precision)
    weight, gradient = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    states = kernel.init_state("weight", weight)
    benchmark(kernel.update, weight, gradient, states, 1, 1e-3)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_transfer_of_64_mib(benchmark: Any, tmp_path: Path, direction: str) -> None:
    with DiskFile(tmp_path, _BYTES) as disk:
        content = torch.zeros(_BYTES, dtype=torch.uint8)
        disk.write_from(content, 0)
        benchmark(disk.read_into if direction == "read" else disk.write_from, content, 0)


def test_a_thousand_instructions_that_wait_for_one_another(benchmark: Any) -> None:
    """What handing over between lanes costs: every compute waits for a read, every write for a compute."""
    lanes = ("read", "compute", "write")
    phase = [
        Instruction(
            id=number, lane=lanes[number % 3], operation="read", after=[number - 1] if number % 3 else []
        )
        for number in range(999)
    ]
    with LaneSet.of_kind("cpu") as lane_set:
        benchmark(lane_set.run, phase, lambda instruction: None, lambda buffer: None)


# planning


@pytest.mark.parametrize("regions", [12, 48])
def test_plan_of_a_chain(benchmark: Any, regions: int) -> None:
    benchmark.pedantic(plan_of, (chain(regions), 10**9), rounds=3)


@pytest.mark.parametrize("layout", ["packed", "tight"])
def test_lowering_with_its_layout(benchmark: Any, layout: str) -> None:
    choices, problem = _streamed(48)
    benchmark.pedantic(lower, (problem, choices), {"layout": layout}, rounds=3)


def test_simulation(benchmark: Any) -> None:
    choices, problem = _streamed(48)
    benchmark.pedantic(simulate, (problem, lower(problem, choices)), rounds=3)


def _streamed(regions: int) -> tuple[Placement, Problem]:
    sketch = chain(regions, weight=2**20)
    choices = placement(sketch, weights="streamed", state="streamed", prefetch=1, chunk_slots=3)
    return choices, build_problem(sketch.graph(), sketch.costs())


# whole steps


@pytest.fixture
def small() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    case = BY_NAME["gpt2"]
    return case.build(), case.batches(1, rows=_ROWS)[0]


def test_step_of_the_plain_loop(benchmark: Any, small: tuple[torch.nn.Module, dict[str, Any]]) -> None:
    model, batch = small
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    benchmark(step)


@pytest.mark.parametrize("solver", ["resident", "layerwise"])
def test_step_on_a_plan(
    benchmark: Any, small: tuple[torch.nn.Module, dict[str, Any]], solver: str, tmp_path: Path
) -> None:
    model, batch = small
    with stages.offload(model, batch, "4GB", solver=solver, disk=str(tmp_path)) as session:
        benchmark(session.step, batch)
