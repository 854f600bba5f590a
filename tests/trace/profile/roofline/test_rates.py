"""Kernels take what bounds them, and costs of hardware follow its numbers."""

from __future__ import annotations

import msgspec
import pytest
import torch

from stages.cli import compose
from stages.trace.profile.roofline import stage
from stages.trace.profile.roofline.rates import Roofline, links_of
from stages.trace.profile.roofline.recorder import Kernel
from tests.trace.tracing import traced


def rates(*overrides: str) -> Roofline:
    return Roofline.of(compose(["model=mlp", "hardware=a100-40", "budget=1GB", *overrides]).hardware)


def test_a_kernel_is_bound_by_operations_or_by_bytes_and_always_launched() -> None:
    rate = rates("hardware.achievable=1", "hardware.memory_achievable=1", "hardware.launch_us=2")
    assert rate(Kernel("mm", 312 * 10**9, torch.bfloat16, 1)) == pytest.approx(10**6 + 2000)
    assert rate(Kernel("mm", 1, torch.bfloat16, 1555 * 10**6)) == pytest.approx(10**6 + 2000)
    assert rate(Kernel("mm", 195 * 10**8, torch.float32, 1)) == pytest.approx(10**6 + 2000)


def test_fp32_products_use_tf32_only_where_allowed() -> None:
    kernel = Kernel("mm", 10**12, torch.float32, 1)
    assert rates("hardware.allow_tf32=true")(kernel) < rates()(kernel) / 7


def test_costs_on_a_gpu_keep_structure_and_follow_the_entry() -> None:
    graph = traced("gpt2")
    config = compose(["model=gpt2", "hardware=h100", "budget=1GB"])
    costs = stage.run(config, graph)
    assert (costs.source, costs.device, costs.stage_peak_bytes) == ("roofline", "cuda", {})
    assert [cost.kind for cost in costs.regions] == sorted({region.kind for region in graph.regions})
    assert [link.name for link in costs.links] == ["upload", "download", "disk_read", "disk_write"]
    assert all(link.contended_bytes_per_s <= link.bytes_per_s for link in links_of(config.hardware))
    assert costs.baseline_bytes == 80 * 10**6
    assert costs.host_baseline_bytes == 4 * 10**9
    # AdamW in fp32: gradient, weight and two moments read, the last three written
    assert costs.optimizer.elements_per_s == pytest.approx(3352e9 * 0.85 / 28, rel=1e-6)


def test_costs_take_nothing_of_this_machine() -> None:
    graph = traced("mlp")
    config = compose(["model=mlp", "hardware=laptop", "budget=1GB"])
    assert msgspec.json.encode(stage.run(config, graph)) == msgspec.json.encode(stage.run(config, graph))
