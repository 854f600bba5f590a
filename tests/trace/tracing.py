"""Small models traced once per test session, and their graphs run in a row on real tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stages.artifacts import graph as g
from stages.region.initial import decode_literal
from stages.region.interpreter import RegionFunction
from stages.trace.stage import trace_module
from tests.models_for_tests import BY_NAME, SmallModel


@functools.cache
def traced(name: str, precision: str = "fp32", granularity: str = "block") -> g.RegionGraph:
    """The graph of one of the small models, at its default batch."""
    small = BY_NAME[name]
    torch.manual_seed(0)
    return trace_module(small.build(), (), small.batches(1)[0], precision=precision, granularity=granularity)


def built(small: SmallModel, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return small.build().train()


def at(batch: Any, path: Iterable[str | int]) -> Any:
    """What lies at `path` in nested mappings, sequences and dataclasses."""
    for part in path:
        batch = (
            getattr(batch, str(part))
            if hasattr(batch, str(part)) and not hasattr(batch, "keys")
            else batch[part]
        )
    return batch


def weights_of(graph: g.RegionGraph, model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors in the graph's dtypes, as leaves of their own."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    result = {}
    for parameter in graph.parameters:
        source = own[parameter.name].detach() if parameter.name in own else decode_literal(parameter)
        dtype = getattr(torch, parameter.spec.dtype)
        result[parameter.name] = source.clone().to(dtype).requires_grad_(parameter.requires_grad)
    return result


def run_regions(
    graph: g.RegionGraph, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: Any
) -> Tensor:
    """The loss, from the regions one after another."""
    batch = {"args": args, "kwargs": kwargs}
    values = {spec.name: at(batch, spec.path) for spec in graph.inputs}
    sizes = {name: symbol.planned for name, symbol in graph.symbols.items()}
    for spec in graph.inputs:
        for size, actual in zip(spec.spec.shape, values[spec.name].shape, strict=True):
            if isinstance(size, str):
                sizes[size] = actual
    for region in graph.regions:
        function = RegionFunction(graph, region, torch.device("cpu"))
        outputs = function({**weights, **{name: values[name] for name in region.inputs}}, sizes)
        values.update(outputs)
    return values[graph.loss]
