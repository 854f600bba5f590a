"""Speed of the parts that a step is made of: `nox -s bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.config import OptimizerConfig
from stages.optim.make import make_kernel
from stages.runtime.tiers.disk import DiskFile
from tests.solve.planning import plan_of
from tests.solve.synthetic import chain

_ELEMENTS = 1 << 22
_BYTES = 64 << 20


def test_update_of_one_chunk(benchmark: Any) -> None:
    kernel = make_kernel("adamw", OptimizerConfig(name="adamw"), "fp32")
    weight, gradient = torch.randn(_ELEMENTS), torch.randn(_ELEMENTS)
    states = kernel.init_state("weight", weight)
    benchmark(kernel.update, weight, gradient, states, 1, 1e-3)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_transfer_of_64_mib(benchmark: Any, tmp_path: Path, direction: str) -> None:
    with DiskFile(tmp_path, _BYTES) as disk:
        content = torch.zeros(_BYTES, dtype=torch.uint8)
        disk.write_from(content, 0)
        benchmark(disk.read_into if direction == "read" else disk.write_from, content, 0)


@pytest.mark.parametrize("regions", [12, 48])
def test_plan_of_a_chain(benchmark: Any, regions: int) -> None:
    benchmark.pedantic(plan_of, (chain(regions), 10**9), rounds=3)
