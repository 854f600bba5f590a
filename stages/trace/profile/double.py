"""A region in double precision with its dropout off, so that what differs is meaning, not rounding."""

from __future__ import annotations

import msgspec
import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError

#: what names of floating dtypes begin with
FLOATS = ("float", "bfloat")

#: weights beyond this many elements stay in fp32, or the trial would take more memory than training
_MOST_ELEMENTS = 1 << 23

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}

#: operator -> position and name of its probability
_DROPOUTS = {
    "aten.dropout": (1, "p"),
    "aten.dropout_": (1, "p"),
    "aten.feature_dropout": (1, "p"),
    "aten.alpha_dropout": (1, "p"),
    "aten.native_dropout": (1, "p"),
    "aten.lstm": (5, "dropout"),
    "aten.gru": (5, "dropout"),
    "aten.rnn_tanh": (5, "dropout"),
    "aten.rnn_relu": (5, "dropout"),
    "aten.scaled_dot_product_attention": (4, "dropout_p"),
}


def tolerance(tensor: torch.Tensor) -> float:
    """How far two results may be apart, relative to the largest element."""
    return _TOLERANCES.get(tensor.dtype, 1e-4)


def in_double(graph: g.RegionGraph, region: g.Region) -> g.RegionGraph:
    """`graph` with the nodes of `region` and all dtypes changed.

    Raises:
        ConfigError: Something draws random numbers that cannot be turned off.
    """
    sizes = g.planned_sizes(graph)
    specs = {item.name: item.spec for item in graph.parameters}
    elements = sum(g.storage_elements(specs[name], sizes) for name in region.parameters)
    wide = "float64" if elements <= _MOST_ELEMENTS else "float32"
    nodes = list(graph.nodes)
    for index in range(region.start, region.end):
        node = _without_dropout(nodes[index])
        nodes[index] = msgspec.structs.replace(
            node,
            args=[_widened(arg, wide) for arg in node.args],
            kwargs={name: _widened(arg, wide) for name, arg in node.kwargs.items()},
            autocast=None,
        )
    parameters = [
        msgspec.structs.replace(item, spec=_wide_spec(item.spec, wide)) for item in graph.parameters
    ]
    values = [msgspec.structs.replace(item, spec=_wide_spec(item.spec, wide)) for item in graph.values]
    return msgspec.structs.replace(graph, nodes=nodes, parameters=parameters, values=values, precision=wide)


def cast(tensor: torch.Tensor, graph: g.RegionGraph) -> torch.Tensor:
    """`tensor` in the precision of `graph`, which `in_double` gave."""
    wide = torch.float64 if graph.precision == "float64" else torch.float32
    return tensor.to(wide) if tensor.is_floating_point() else tensor


def _wide_spec(spec: g.TensorSpec, wide: str) -> g.TensorSpec:
    return msgspec.structs.replace(spec, dtype=wide) if spec.dtype.startswith(FLOATS) else spec


def _widened(arg: g.Arg, wide: str) -> g.Arg:
    if isinstance(arg, g.Dtype) and arg.name.startswith(FLOATS):
        return g.Dtype(wide)
    return arg


def _without_dropout(node: g.Node) -> g.Node:
    if not node.random:
        return node
    known = _DROPOUTS.get(node.op.rpartition(".")[0])
    if known is None:
        raise ConfigError(
            f"whether the batch may be cut into micro-batches cannot be found out: {node.location} draws "
            f"random numbers by {node.op}, which the trial cannot turn off. Declare how the losses of slices "
            f"make the batch's (train.loss=mean, token_mean or sum), or use train.micro_batches=1",
            key="train.loss",
            found="auto",
            expected="mean, token_mean or sum",
        )
    position, name = known
    if name in node.kwargs:
        return msgspec.structs.replace(node, kwargs={**node.kwargs, name: 0.0})
    args = list(node.args)
    args[position] = 0.0
    return msgspec.structs.replace(node, args=args)
