"""From a batch to the sizes of its dynamic dimensions, checked before the step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError
from stages.region import operators


def bind(graph: g.RegionGraph, batch: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The value of each size symbol for this batch.

    Args:
        batch: Every graph input by name.

    Raises:
        DataError: An input is missing or unknown, has another dtype or number of dimensions, or a
            dimension is not what was traced, outside its bounds, or larger than planned.
    """
    _check_names(graph, batch)
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        _bind_input(graph, spec, batch[spec.name], sizes)
    for spec in graph.inputs:
        _check_shape(spec, batch[spec.name], sizes)
    return sizes


def _check_names(graph: g.RegionGraph, batch: Mapping[str, torch.Tensor]) -> None:
    expected = {spec.name for spec in graph.inputs}
    if set(batch) != expected:
        raise DataError(
            f"the batch has inputs {sorted(batch)}; the traced model takes {sorted(expected)}. "
            f"Give exactly these",
            found=str(sorted(batch)),
            expected=str(sorted(expected)),
        )


def _bind_input(graph: g.RegionGraph, spec: g.InputSpec, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    dtype = operators.dtype(spec.spec.dtype)
    if tensor.dtype != dtype or tensor.dim() != len(spec.spec.shape):
        raise DataError(
            f"input {spec.name} is {tensor.dtype} with {tensor.dim()} dimensions; "
            f"the traced model takes {dtype} with {len(spec.spec.shape)}. Convert the batch",
            found=str(tensor.dtype),
            expected=str(dtype),
        )
    for dimension, (size, expected) in enumerate(zip(tensor.shape, spec.spec.shape, strict=True)):
        if not isinstance(expected, str):
            continue
        symbol = graph.symbols[expected]
        if sizes.setdefault(expected, size) != size:
            raise DataError(
                f"input {spec.name} has size {size} in dimension {dimension}, another input has "
                f"{sizes[expected]} for the same dimension. Make them equal"
            )
        if not symbol.minimum <= size <= min(symbol.maximum, symbol.planned):
            raise DataError(
                f"input {spec.name} has size {size} in dimension {dimension}; this plan takes "
                f"{symbol.minimum} to {min(symbol.maximum, symbol.planned)}. "
                f"Plan again with the larger size",
                found=str(size),
                expected=f"<= {min(symbol.maximum, symbol.planned)}",
            )


def _check_shape(spec: g.InputSpec, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    expected = [g.evaluate_size(size, sizes) for size in spec.spec.shape]
    if list(tensor.shape) != expected:
        raise DataError(
            f"input {spec.name} has shape {list(tensor.shape)}; this plan takes {expected}. "
            f"Its other dimensions were fixed when the model was traced",
            found=str(list(tensor.shape)),
            expected=str(expected),
        )
