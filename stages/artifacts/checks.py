"""What a graph file must be beyond its types, before anything acts on it.

The types say what a field may hold; here it is checked that fields agree: that regions cut the
nodes, that every name leads somewhere, that sizes are sizes. Operators are checked where they are
looked up (`stages.region.operators`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import PurePath

from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import (
    BYTES_PER_ELEMENT,
    SIZE_OPERATORS,
    Arg,
    Expr,
    Node,
    Ref,
    Region,
    RegionGraph,
    Scalar,
    Size,
    SizeArg,
    TensorSpec,
    element_count,
)

#: more than any disk holds: a tensor of this size is a mistake or a trap
_LARGEST_TENSOR_BYTES = 2**48


def check_graph(graph: RegionGraph) -> None:
    """Checks that the parts of `graph` fit each other.

    Raises:
        ArtifactError: Names the first thing that does not fit.
    """
    _check_names(graph)
    _check_sizes(graph)
    _check_regions(graph)
    _check_values(graph)
    _check_initial(graph)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ArtifactError(f"the graph is damaged: {what}. Trace the model again")


def _check_names(graph: RegionGraph) -> None:
    names = [node.name for node in graph.nodes] + [item.name for item in graph.parameters]
    names += [item.name for item in graph.inputs]
    seen: set[str] = set()
    for name in names:
        _require(name not in seen, f"{name} is defined twice")
        seen.add(name)
    regions = [region.name for region in graph.regions]
    _require(len(set(regions)) == len(regions), "two regions have one name")


def _check_sizes(graph: RegionGraph) -> None:
    for name, symbol in graph.symbols.items():
        fits = 0 <= symbol.minimum <= symbol.planned <= symbol.maximum
        _require(fits, f"size {name} is planned as {symbol.planned}, outside its bounds")
    planned = {name: symbol.planned for name, symbol in graph.symbols.items()}
    specs = [(item.name, item.spec) for item in (*graph.parameters, *graph.inputs, *graph.values)]
    for name, spec in specs:
        _check_spec(name, spec, planned)
    for parameter in graph.parameters:
        known = parameter.initial_dtype in BYTES_PER_ELEMENT
        _require(known, f"{parameter.name} has the unknown dtype {parameter.initial_dtype}")
        _require(parameter.role in ("parameter", "buffer", "constant"), f"{parameter.name} has no known role")
    for node in graph.nodes:
        for arg in _flattened([*node.args, *node.kwargs.values()]):
            if isinstance(arg, SizeArg):
                _check_size(node.name, arg.size, planned)


def _check_spec(name: str, spec: TensorSpec, planned: dict[str, int]) -> None:
    _require(spec.dtype in BYTES_PER_ELEMENT, f"{name} has the unknown dtype {spec.dtype}")
    _require(len(spec.shape) == len(spec.stride), f"{name} has {len(spec.shape)} sizes, other strides")
    for size in (*spec.shape, *spec.stride):
        _check_size(name, size, planned)
        _require(not isinstance(size, int) or size >= 0, f"{name} has the size {size}")
    size_bytes = element_count(spec, planned) * BYTES_PER_ELEMENT[spec.dtype]
    _require(size_bytes <= _LARGEST_TENSOR_BYTES, f"{name} would take {size_bytes} bytes")


def _check_size(owner: str, size: Size, planned: dict[str, int]) -> None:
    if isinstance(size, str):
        _require(size in planned, f"{owner} has the unknown size {size}")
    elif isinstance(size, Expr):
        _require(size.operator in SIZE_OPERATORS, f"{owner} computes a size by {size.operator}")
        _check_size(owner, size.left, planned)
        _check_size(owner, size.right, planned)


def _check_regions(graph: RegionGraph) -> None:
    end = 0
    parameters = {parameter.name for parameter in graph.parameters}
    available = {item.name for item in graph.inputs}
    for region in graph.regions:
        _require(region.start == end < region.end, f"region {region.name} does not follow the one before")
        end = region.end
        _require(end <= len(graph.nodes), f"region {region.name} ends after the last node")
        unknown = sorted({*region.parameters, *region.gradients, *region.mutates} - parameters)
        _require(not unknown, f"region {region.name} reads {unknown}, which are no parameters")
        missing = sorted(set(region.inputs) - available)
        _require(not missing, f"region {region.name} reads {missing}, which no earlier region makes")
        _check_nodes(region, graph.nodes[region.start : region.end])
        available.update(region.outputs)
    _require(end == len(graph.nodes), "some nodes are in no region")


def _check_nodes(region: Region, nodes: list[Node]) -> None:
    known = {*region.inputs, *region.parameters}
    made: set[str] = set()
    for node in nodes:
        for arg in _flattened([*node.args, *node.kwargs.values()]):
            if isinstance(arg, Ref):
                _require(arg.name in known, f"node {node.name} reads {arg.name}, which is not there yet")
        known.add(node.name)
        made.add(node.name)
    missing = sorted(set(region.outputs) - made)
    _require(not missing, f"region {region.name} does not make its outputs {missing}")


def _flattened(args: Iterable[Arg | list[Scalar]]) -> Iterator[Scalar]:
    for arg in args:
        if isinstance(arg, list):
            yield from _flattened(arg)
        else:
            yield arg


def _check_values(graph: RegionGraph) -> None:
    values = {value.name for value in graph.values}
    count = len(graph.regions)
    for value in graph.values:
        users = (value.producer, *value.consumers)
        _require(all(-1 <= user < count for user in users), f"{value.name} is used by an unknown region")
    for region in graph.regions:
        unknown = sorted({*region.inputs, *region.outputs} - values)
        _require(not unknown, f"nothing is known of the values {unknown} of region {region.name}")
    if graph.loss:
        _require(graph.loss in values, f"the loss {graph.loss} is no value")


def _check_initial(graph: RegionGraph) -> None:
    _require(graph.initial.source in ("replay", "safetensors", "live"), "initial values have no known source")
    for file in graph.initial.files:
        plain = file not in ("", ".", "..") and PurePath(file).name == file
        _require(plain, f"initial values are read from {file!r}, which is no file name in their folder")
