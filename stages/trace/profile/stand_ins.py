"""Tensors that stand in for a region's weights and inputs while it is measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stages.artifacts import graph as g
from stages.region import operators
from stages.region.sums import summed_in_engine

_STANDARD_DEVIATION = 0.02
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A region to measure, and which gradients meet in its backward.

    Attributes:
        gradients_of: Inputs and weights that backward is asked for.
        received: Outputs whose gradient later regions (or the loss) send.
        sums: Names in `gradients_of` that later regions have already sent a gradient to and whose
            sum grows inside the engine: these are roots too, and the new sum is made beside the old.
    """

    region: g.Region
    gradients_of: frozenset[str]
    received: frozenset[str]
    sums: frozenset[str]


def representative_cases(graph: g.RegionGraph) -> dict[int, Case]:
    """For each kind the region whose backward has the most bytes of sums under way: kinds are equal
    in structure, but a first use has sums to add to where a last use has none."""
    values = {value.name: value for value in graph.values}
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    sizes = g.planned_sizes(graph)
    seen_later: set[str] = set()
    chosen: dict[int, tuple[int, Case]] = {}
    for region in reversed(graph.regions):
        inputs = frozenset(name for name in region.inputs if name in values and values[name].requires_grad)
        wanted = inputs | frozenset(region.gradients)
        case = Case(
            region=region,
            gradients_of=wanted,
            received=frozenset(
                name
                for name in region.outputs
                if name == graph.loss or (values[name].requires_grad and values[name].consumers)
            ),
            sums=(inputs | summed_in_engine(graph, region)) & seen_later,
        )
        seen_later |= wanted
        specs = [values[name].spec if name in values else parameters[name].spec for name in case.sums]
        weight = sum(g.storage_bytes(spec, sizes) for spec in specs)
        if region.kind not in chosen or weight > chosen[region.kind][0]:
            chosen[region.kind] = (weight, case)
    return {kind: case for kind, (_, case) in sorted(chosen.items())}


def region_tensors(
    graph: g.RegionGraph, region: g.Region, device: torch.device = _CPU
) -> dict[str, torch.Tensor]:
    """Inputs, weights and buffers of `region` by name, with contents that any operator can take."""
    specs = {spec.name: spec.spec for spec in graph.inputs}
    specs |= {value.name: value.spec for value in graph.values}
    specs |= {parameter.name: parameter.spec for parameter in graph.parameters}
    sizes = g.planned_sizes(graph)
    return {name: stand_in(specs[name], sizes, device) for name in (*region.inputs, *region.parameters)}


def stand_in(spec: g.TensorSpec, sizes: dict[str, int], device: torch.device = _CPU) -> torch.Tensor:
    """A tensor of this shape, stride and dtype: small normal floats, zeros (which index anything),
    true booleans."""
    dtype = operators.dtype(spec.dtype)
    shape = [g.evaluate_size(size, sizes) for size in spec.shape]
    stride = [g.evaluate_size(size, sizes) for size in spec.stride]
    # filled flat, since an expanded tensor cannot be written to
    elements = g.storage_bytes(spec, sizes) // g.BYTES_PER_ELEMENT[spec.dtype]
    flat = torch.empty(elements, dtype=dtype, device=device)
    fill(flat)
    return flat.as_strided(shape, stride)


def fill(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.normal_(0.0, _STANDARD_DEVIATION)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.zero_()


def gradient_like(tensor: torch.Tensor) -> torch.Tensor:
    """A small random gradient in the layout of `tensor`, dense where that is expanded."""
    gradient = torch.empty_like(tensor)
    fill(gradient)
    return gradient


def least_bytes(graph: g.RegionGraph, case: Case) -> int:
    """A lower bound, from shapes alone, of what this region holds at once during backward: inputs,
    weights, and the gradients asked for and received."""
    sizes = g.planned_sizes(graph)
    specs = {value.name: value.spec for value in graph.values}
    specs |= {spec.name: spec.spec for spec in graph.inputs}
    specs |= {parameter.name: parameter.spec for parameter in graph.parameters}
    region = case.region
    held = [*region.inputs, *region.parameters, *case.gradients_of, *case.received]
    return sum(g.storage_bytes(specs[name], sizes) for name in held)
