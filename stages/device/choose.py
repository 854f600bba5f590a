"""A device by its name in a plan."""

from __future__ import annotations

import torch

from stages.artifacts.errors import ConfigError
from stages.device.cpu import Cpu
from stages.device.cuda import Cuda
from stages.device.emulated import Emulated
from stages.device.interface import Device


def device_named(name: str) -> Device:
    """Args:
        name: "cpu" | "cuda" | "emulated".

    Raises:
        ConfigError: There is no such device here.
    """
    if name == "cpu":
        return Cpu()
    if name == "emulated":
        return Emulated()
    if name != "cuda":
        raise ConfigError(
            f"device={name} is unknown; expected cpu, cuda or emulated", key="device", found=name
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda: this torch sees no CUDA device. Use device=cpu, or install a CUDA build of torch "
            "and its driver",
            key="device",
            found="cuda",
            expected="cpu",
        )
    return Cuda()
