"""A batch of few rows, and where the rows are in each value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.artifacts import graph as g
from stages.artifacts.slicing import BATCH
from stages.region import operators
from stages.region.initial import decode_literal
from stages.region.targets import Targets

#: of every other dimension that may vary
_LENGTH = 8
_IGNORED_EVERY = 3


def few_sizes(graph: g.RegionGraph, rows: int) -> dict[str, int]:
    """Sizes for a trial: `rows` rows, and whatever else may vary small."""
    sizes = {
        name: min(symbol.planned, max(symbol.minimum, _LENGTH)) for name, symbol in graph.symbols.items()
    }
    return {**sizes, BATCH: max(rows, graph.symbols[BATCH].minimum)}


class Rows:
    """Cuts values along the dimension in which their rows lie."""

    def __init__(self, graph: g.RegionGraph, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self._specs = {value.name: value.spec for value in graph.values}
        self._specs |= {spec.name: spec.spec for spec in graph.inputs}

    def sizes_of(self, rows: range) -> dict[str, int]:
        return {**self.sizes, BATCH: len(rows)}

    def dimension(self, spec: g.TensorSpec) -> int | None:
        """The dimension that grows with the batch; None where none does.

        Raises:
            ValueError: Several do, or one that does not grow in proportion: rows meet rows there.
        """
        more = {**self.sizes, BATCH: 2 * self.sizes[BATCH]}
        found = None
        for index, size in enumerate(spec.shape):
            here, there = g.evaluate_size(size, self.sizes), g.evaluate_size(size, more)
            if here != there:
                if found is not None or there != 2 * here:
                    raise ValueError(f"a tensor of shape {spec.shape} has rows against rows")
                found = index
        return found

    def cut(self, tensors: Mapping[str, torch.Tensor], rows: range) -> dict[str, torch.Tensor]:
        """Those rows of each tensor; all of those that have none."""
        return {name: self.part(tensors, name, rows) for name in tensors}

    def part(self, tensors: Mapping[str, torch.Tensor], name: str, rows: range) -> torch.Tensor:
        """A view of those rows; the whole tensor where it has none (a weight, positions)."""
        spec = self._specs.get(name)
        dimension = None if spec is None else self.dimension(spec)
        if dimension is None:
            return tensors[name]
        per_row = tensors[name].shape[dimension] // self.sizes[BATCH]
        return tensors[name].narrow(dimension, rows.start * per_row, len(rows) * per_row)

    def random(self, spec: g.TensorSpec) -> torch.Tensor:
        """Normal numbers in the shape and layout of `spec`."""
        shape = [g.evaluate_size(size, self.sizes) for size in spec.shape]
        stride = [g.evaluate_size(size, self.sizes) for size in spec.stride]
        flat = torch.randn(g.storage_elements(spec, self.sizes), dtype=torch.float32)
        return flat.to(operators.dtype(spec.dtype)).as_strided(shape, stride)


def input_rows(graph: g.RegionGraph, rows: Rows, targets: Targets | None) -> dict[str, torch.Tensor]:
    """A random batch: small integers, which index anything; rows have different numbers of targets."""
    found = {}
    for spec in graph.inputs:
        shape = [g.evaluate_size(size, rows.sizes) for size in spec.spec.shape]
        dtype = operators.dtype(spec.spec.dtype)
        if dtype.is_floating_point or dtype.is_complex:
            found[spec.name] = rows.random(spec.spec)
        elif dtype == torch.bool or spec.name.endswith("mask"):
            found[spec.name] = torch.ones(shape, dtype=dtype)
        else:
            found[spec.name] = torch.randint(2, shape, dtype=dtype)
    if targets is None:
        return found
    for name in targets.inputs:
        if found[name].dim() >= 2:
            # in the first row most are ignored, in the others a few
            found[name][0, 1:-1] = targets.ignored
            found[name][1:, ::_IGNORED_EVERY] = targets.ignored
    return found


def weight_like(parameter: g.Parameter, sizes: dict[str, int]) -> torch.Tensor:
    """A stand-in for a weight or buffer: small numbers for weights; positive ones for buffers, which
    may be variances; constants as they are."""
    if parameter.literal is not None:
        tensor = decode_literal(parameter)
        dtype = operators.dtype(parameter.spec.dtype)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    shape = [g.evaluate_size(size, sizes) for size in parameter.spec.shape]
    stride = [g.evaluate_size(size, sizes) for size in parameter.spec.stride]
    dtype = operators.dtype(parameter.spec.dtype)
    flat = torch.zeros(g.storage_elements(parameter.spec, sizes), dtype=dtype)
    if dtype.is_floating_point:
        flat.normal_(0.0, 0.05)
        if parameter.role != "parameter":
            flat.abs_().add_(0.5)
    return flat.as_strided(shape, stride)
