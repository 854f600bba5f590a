"""A machine as numbers: what a plan for hardware that is not here is made from (`conf/hardware/`).

Rates are dense peaks of data sheets; `achievable` and `memory_achievable` say how much of them real
kernels reach. GB/s is 10^9 bytes per second; memory sizes are text, as for `budget`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from stages.artifacts.errors import ConfigError
from stages.sizes import parse_size

#: the option that stands for this machine, measured
MEASURED = "none"

#: fields that hold a size as text
SIZE_FIELDS = ("memory", "context", "baseline", "host_memory", "host_baseline", "disk")
_FRACTIONS = ("achievable", "memory_achievable")


@dataclass
class HardwareConfig:
    """An accelerator, its host and the host's disk. Name "none": this machine, measured.

    Attributes:
        memory: Device memory.
        fp32_tflops, tf32_tflops, bf16_tflops, fp16_tflops: Dense peaks in 10^12 operations per
            second (a multiply-add is two), 16-bit ones with fp32 accumulation.
        achievable: Share of those peaks that large matrix products reach.
        memory_gb_s: Bandwidth of device memory; memory_achievable: share that kernels reach.
        launch_us: What every kernel costs beside its work.
        allow_tf32: Whether fp32 matrix products may round their inputs to tf32 (torch's default: no).
        flash_attention: Whether 16-bit attention without a mask has a flash kernel (Ampere and later).
        context: Device memory of the CUDA context and loaded kernels: outside the allocator, so not in
            the budget, but beside it on the device.
        baseline: Device memory of the libraries' workspaces (cuBLAS asks the allocator for them).
        allocator_overhead: Share that the caching allocator holds beyond live bytes.
        upload_gb_s, download_gb_s: Host to device and back, from pinned memory, each alone;
            both_gb_s: each of them while the other runs too. link_latency_us: of a transfer.
        host_memory: What the host has; host_baseline: of it, the training process (libraries, driver).
        host_cores: Cores of the host.
        disk: Room for the disk tier. disk_read_gb_s, disk_write_gb_s: each alone;
            disk_read_both_gb_s, disk_write_both_gb_s: while the other runs too.
    """

    name: str = MEASURED
    memory: str = ""
    fp32_tflops: float = 0.0
    tf32_tflops: float = 0.0
    bf16_tflops: float = 0.0
    fp16_tflops: float = 0.0
    achievable: float = 0.7
    memory_gb_s: float = 0.0
    memory_achievable: float = 0.85
    launch_us: float = 5.0
    allow_tf32: bool = False
    flash_attention: bool = True
    context: str = "500MB"
    baseline: str = "80MB"
    allocator_overhead: float = 0.04
    upload_gb_s: float = 0.0
    download_gb_s: float = 0.0
    both_gb_s: float = 0.0
    link_latency_us: float = 10.0
    host_memory: str = ""
    host_baseline: str = "4GB"
    host_cores: int = 8
    disk: str = ""
    disk_read_gb_s: float = 0.0
    disk_write_gb_s: float = 0.0
    disk_read_both_gb_s: float = 0.0
    disk_write_both_gb_s: float = 0.0
    disk_latency_us: float = 100.0

    def __post_init__(self) -> None:
        if not self.planned_for:
            return
        for record in dataclasses.fields(self):
            value = getattr(self, record.name)
            key = f"hardware.{record.name}"
            if record.name in SIZE_FIELDS:
                parse_size(value, key)
            elif record.name in _FRACTIONS:
                _require(0 < value <= 1, key, value, "more than 0, at most 1")
            elif record.name == "allocator_overhead":
                _require(0 <= value < 1, key, value, "from 0 up to, not including, 1")
            elif not isinstance(value, (str, bool)):
                _require(math.isfinite(value) and value > 0, key, value, "a positive number")

    @property
    def planned_for(self) -> bool:
        """Whether plans are made for this entry instead of the machine at hand."""
        return self.name != MEASURED

    def size(self, field: str) -> int:
        """Bytes of one of `SIZE_FIELDS`."""
        return parse_size(getattr(self, field), f"hardware.{field}")


def _require(condition: bool, key: str, found: object, expected: str) -> None:
    if not condition:
        message = f"{key}={found} cannot be used; expected {expected}"
        raise ConfigError(message, key=key, found=str(found), expected=expected)
