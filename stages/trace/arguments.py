"""Arguments of operators as plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from stages.artifacts import graph as g
from stages.region import operators


class UnknownArgumentError(Exception):
    """An argument that the artifact's grammar has no form for."""


def encode(value: Any, encode_other: Callable[[Any], g.Arg | None], device: str = "target") -> g.Arg:
    """`value` as an argument; `encode_other` is asked first about everything that is not plain.

    Args:
        device: What a CPU device in an argument stands for: "target" (where the plan runs) or "cpu".

    Raises:
        UnknownArgumentError: There is no form for it.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else g.Special(str(value))
    if isinstance(value, (list, tuple)):
        return [encode(item, encode_other, device) for item in value]  # type: ignore[misc]
    special = encode_other(value)
    if special is not None:
        return special
    if isinstance(value, torch.dtype) and value in operators.DTYPE_NAMES:
        return g.Dtype(operators.DTYPE_NAMES[value])
    if isinstance(value, torch.device):
        return g.Device(device)
    if isinstance(value, torch.layout) and value is torch.strided:
        return g.Layout("strided")
    if isinstance(value, torch.memory_format) and value in operators.MEMORY_FORMAT_NAMES:
        return g.MemoryFormat(operators.MEMORY_FORMAT_NAMES[value])
    raise UnknownArgumentError(f"a {type(value).__name__} ({value!r:.80})")
