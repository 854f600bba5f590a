"""Rates of a hardware entry: nanoseconds of kernels, links, and the optimizer's throughput."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import LinkCost, OptimizerCost
from stages.config import HardwareConfig
from stages.optim.groups import Groups
from stages.trace.profile.optimizer import state_specs
from stages.trace.profile.roofline.recorder import Kernel

_FP32_BYTES = 4
#: kernels of one update: the fused step, and under bf16 and fp16 the casts before and after it
_UPDATE_KERNELS = 3


@dataclass(frozen=True)
class Roofline:
    """Nanoseconds of a kernel on one device."""

    operations_per_ns: dict[torch.dtype, float]
    bytes_per_ns: float
    launch_ns: float

    @staticmethod
    def of(hardware: HardwareConfig) -> Roofline:
        fp32 = hardware.tf32_tflops if hardware.allow_tf32 else hardware.fp32_tflops
        peaks = {
            torch.float32: fp32,
            torch.bfloat16: hardware.bf16_tflops,
            torch.float16: hardware.fp16_tflops,
        }
        # 10^12 operations per second are 10^3 per nanosecond, 10^9 bytes per second 1 per nanosecond
        return Roofline(
            {dtype: peak * 1e3 * hardware.achievable for dtype, peak in peaks.items()},
            hardware.memory_gb_s * hardware.memory_achievable,
            hardware.launch_us * 1e3,
        )

    def __call__(self, kernel: Kernel) -> float:
        # float64, complex and integer products are rare in models; the fp32 peak flatters them
        peak = self.operations_per_ns.get(kernel.dtype, self.operations_per_ns[torch.float32])
        return max(kernel.flops / peak, kernel.moved_bytes / self.bytes_per_ns) + self.launch_ns


def links_of(hardware: HardwareConfig) -> list[LinkCost]:
    """Host memory to device and back, and disk to host memory and back."""
    link_ns, disk_ns = hardware.link_latency_us * 1e3, hardware.disk_latency_us * 1e3
    return [
        _link("upload", link_ns, hardware.upload_gb_s, hardware.both_gb_s),
        _link("download", link_ns, hardware.download_gb_s, hardware.both_gb_s),
        _link("disk_read", disk_ns, hardware.disk_read_gb_s, hardware.disk_read_both_gb_s),
        _link("disk_write", disk_ns, hardware.disk_write_gb_s, hardware.disk_write_both_gb_s),
    ]


def _link(name: str, latency_ns: float, alone_gb_s: float, both_gb_s: float) -> LinkCost:
    return LinkCost(name, round(latency_ns), round(alone_gb_s * 1e9), round(min(alone_gb_s, both_gb_s) * 1e9))


def optimizer_cost(graph: g.RegionGraph, groups: Groups, hardware: HardwareConfig) -> OptimizerCost:
    """Updates are bound by device memory: gradient, weight or master and every state are read, the last
    two written, and under bf16 and fp16 the weight too."""
    kernel, states = groups.base, state_specs(graph, groups)
    trained = [p for p in graph.parameters if p.name in states]
    elements = sum(g.element_count(parameter.spec, {}) for parameter in trained)
    moved = sum(
        g.element_count(parameter.spec, {}) * _update_bytes(parameter)
        + 2 * sum(spec.elements * g.BYTES_PER_ELEMENT[spec.dtype] for spec in states[parameter.name])
        for parameter in trained
    )
    bytes_per_s = hardware.memory_gb_s * hardware.memory_achievable * 1e9
    low_precision = any(parameter.spec.dtype != "float32" for parameter in trained)
    # a fused fp32 update needs none; otherwise the gradient in fp32, or the intermediate results of
    # an optimizer that is written as tensor operations
    fused = kernel.implementation.startswith("fused")
    workspace = (_FP32_BYTES if low_precision else 0) + (0 if fused else 2 * _FP32_BYTES)
    return OptimizerCost(
        implementation=kernel.implementation,
        chunkable=kernel.chunkable,
        elements_per_s=max(1, round(bytes_per_s * elements / max(1, moved))),
        latency_ns=round(_UPDATE_KERNELS * hardware.launch_us * 1e3),
        states=states,
        workspace_bytes_per_element=workspace,
    )


def _update_bytes(parameter: g.Parameter) -> int:
    """Bytes per element beside the states: gradient read, weight or master read and written."""
    itemsize = g.BYTES_PER_ELEMENT[parameter.spec.dtype]
    if itemsize < _FP32_BYTES:
        return itemsize + 2 * _FP32_BYTES + itemsize
    return 3 * itemsize
