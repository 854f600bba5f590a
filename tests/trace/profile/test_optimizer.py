"""What an update costs, and what it keeps, for each kind of kernel and precision."""

from __future__ import annotations

import pytest

from stages.artifacts import graph as g
from stages.config import OptimizerConfig
from stages.optim.make import make_kernel
from stages.region import memory
from stages.trace.profile.optimizer import measure_optimizer
from stages.trace.profile.peak import PeakGauge


def _graph(precision: str, dtype: str) -> g.RegionGraph:
    def parameter(name: str, rows: int, *, requires_grad: bool = True) -> g.Parameter:
        spec = g.TensorSpec([rows, 64], [64, 1], dtype)
        return g.Parameter(name, [name], spec, "parameter", requires_grad=requires_grad)

    return g.RegionGraph(
        model="hand",
        mode="train",
        precision=precision,
        symbols={},
        inputs=[],
        outputs=[],
        loss="loss",
        nodes=[],
        regions=[],
        values=[],
        parameters=[parameter("w", 512), parameter("v", 8), parameter("frozen", 4, requires_grad=False)],
        initial=g.Initial("live"),
    )


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_chunks_of_a_fused_update(precision: str, dtype: str) -> None:
    memory.give_back_large_blocks(1 << 20)
    kernel = make_kernel("adamw", OptimizerConfig(name="adamw"), precision)
    cost = measure_optimizer(_graph(precision, dtype), kernel, PeakGauge())
    assert cost.chunkable
    assert cost.implementation == kernel.implementation
    assert cost.elements_per_s > 0
    assert cost.latency_ns > 0
    assert sorted(cost.states) == ["v", "w"]  # nothing is kept of what is frozen
    assert {spec.dtype for spec in cost.states["w"]} == {"float32"}
    assert [spec.elements for spec in cost.states["w"]] == [512 * 64, 512 * 64]
    # a 16-bit gradient is cast up: four bytes per element
    assert cost.workspace_bytes_per_element == pytest.approx(0 if precision == "fp32" else 4, abs=1)


def test_whole_parameters_of_an_optimizer_without_chunks() -> None:
    kernel = make_kernel("torch.optim.Adafactor", OptimizerConfig(name="torch.optim.Adafactor"), "fp32")
    cost = measure_optimizer(_graph("fp32", "float32"), kernel, PeakGauge())
    assert not cost.chunkable
    assert sorted(cost.states) == ["v", "w"]
    assert cost.elements_per_s > 0
