"""From a graph and its costs to a problem."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from msgspec import structs

from stages.artifacts.costs import Costs, LinkCost, OptimizerCost
from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import (
    BYTES_PER_ELEMENT,
    Parameter,
    Region,
    RegionGraph,
    element_count,
    planned_sizes,
    storage_bytes,
)
from stages.artifacts.slicing import VERTICAL, costs_of_slice, graph_of_slice
from stages.solve.problem import (
    HostTier,
    PersistentBuffer,
    Piece,
    PlannedParameter,
    PlannedRegion,
    PlannedValue,
    Problem,
)
from stages.training import TrainConfig

_HALF_PRECISION = ("float16", "bfloat16")
FP32_BYTES = 4


#: room of a host that nobody has limited
_UNLIMITED = 2**62


def build_problem(
    graph: RegionGraph,
    costs: Costs,
    host_bytes: int | None = None,
    *,
    micro_batches: int = 1,
    order: str = VERTICAL,
    train: TrainConfig | None = None,
) -> Problem:
    """Reduces `graph` and `costs`.

    Args:
        host_bytes: What host memory may hold beside an accelerator; None: no limit.
        micro_batches: Slices that the batch is cut into; the problem's sizes are those of one slice.
        order: In which they pass, see `Placement.micro_batch_order`.
        train: What updates wait for; None: nothing but the overflow check of fp16.

    Raises:
        ArtifactError: They do not fit each other, or the graph's regions do not fit its values.
    """
    graph, costs = graph_of_slice(graph, micro_batches), costs_of_slice(costs, micro_batches)
    train = train or TrainConfig()
    links = {link.name: link for link in costs.links}
    beside = costs.device != "cpu"
    near = ("upload", "download") if beside else ("disk_read", "disk_write")
    for name in (*near, "disk_read", "disk_write"):
        if name not in links:
            raise ArtifactError(f"costs lack the link {name}; found {', '.join(links)}. Profile again")
    has_backward = _regions_with_backward(graph)
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    planned = _planned_parameters(graph, costs, has_backward)
    regions, values = _planned_regions(graph, costs, has_backward), _planned_values(graph, has_backward)
    largest_initial = max((_initial_bytes(parameter) for parameter in graph.parameters), default=0)
    return Problem(
        precision=graph.precision,
        device=costs.device,
        regions=_with_norms(regions, values, planned) if train.clips else regions,
        values=values,
        returned=tuple(spec.name for spec in graph.outputs),
        parameters=planned,
        persistent={
            name: PersistentBuffer(
                name, storage_bytes(parameter.spec, planned_sizes(graph)), parameter.spec.dtype
            )
            for name, parameter in parameters.items()
            if parameter.role != "parameter"
        },
        read=links[near[0]],
        write=links[near[1]],
        optimizer=_clipping(costs.optimizer, graph.precision) if train.clips else costs.optimizer,
        baseline_bytes=costs.baseline_bytes,
        stage_peak_bytes=max(costs.stage_peak_bytes.values(), default=0),
        allocator_overhead_ppm=costs.allocator_overhead_ppm,
        initial_bytes=0 if beside else largest_initial,
        host=_host(costs, links, host_bytes, largest_initial) if beside else None,
        micro_batches=micro_batches,
        micro_batch_order=order,
        defers_update=train.defers_update(graph.precision),
        clips=train.clips,
        accumulate=train.accumulate,
    )


def _clipping(cost: OptimizerCost, precision: str) -> OptimizerCost:
    """Scaling a gradient makes another fp32 tensor; with masters there is one already."""
    if precision != "fp32":
        return cost
    return structs.replace(cost, workspace_bytes_per_element=cost.workspace_bytes_per_element + FP32_BYTES)


def _with_norms(
    regions: tuple[PlannedRegion, ...],
    values: dict[str, PlannedValue],
    parameters: dict[str, PlannedParameter],
) -> tuple[PlannedRegion, ...]:
    """Clipping takes norms as of whole fp32 gradients, which 16-bit ones are cast to after the backward that
    completes them: the cast counts in that backward's peak, beside the gradients that it has made."""
    room: dict[int, int] = {}
    for parameter in parameters.values():
        if parameter.has_master and parameter.updated:
            region = min(parameter.gradient_regions)
            room[region] = max(room.get(region, 0), parameter.elements * FP32_BYTES)
    found = []
    for region in regions:
        if region.index in room:
            made = sum(parameters[name].bytes for name in region.gradients)
            made += sum(values[name].bytes for name in region.inputs if values[name].receives_gradient)
            peak = max(region.cost.backward_peak_bytes, made + room[region.index])
            region = replace(region, cost=structs.replace(region.cost, backward_peak_bytes=peak))
        found.append(region)
    return tuple(found)


def _host(costs: Costs, links: dict[str, LinkCost], host_bytes: int | None, largest_initial: int) -> HostTier:
    """Beside an accelerator initial values are made in host memory, one whole tensor at a time."""
    return HostTier(
        _UNLIMITED if host_bytes is None else host_bytes,
        costs.host_baseline_bytes + largest_initial,
        far_read=_in_a_row(links["disk_read"], links["upload"]),
        far_write=_in_a_row(links["disk_write"], links["download"]),
    )


def _in_a_row(first: LinkCost, second: LinkCost) -> LinkCost:
    """Two links with a bounce buffer between: as fast as the slower one, while both take from compute."""
    busy = (first.busy_bytes_per_s or first.bytes_per_s, second.busy_bytes_per_s or second.bytes_per_s)
    contended = (first.contended_bytes_per_s, second.contended_bytes_per_s)
    busy_contended = (
        first.busy_contended_bytes_per_s or contended[0],
        second.busy_contended_bytes_per_s or contended[1],
    )
    return LinkCost(
        f"{first.name}+{second.name}",
        first.latency_ns + second.latency_ns,
        min(first.bytes_per_s, second.bytes_per_s),
        min(contended),
        min(busy),
        min(busy_contended),
        first.compute_slowdown_ppm + second.compute_slowdown_ppm,
        first.scattered_block_ns + second.scattered_block_ns,
    )


def _initial_bytes(parameter: Parameter) -> int:
    """A parameter as its constructor makes it, before the cast to the precision."""
    return element_count(parameter.spec, {}) * BYTES_PER_ELEMENT[parameter.initial_dtype]


def _regions_with_backward(graph: RegionGraph) -> list[bool]:
    """A region has a backward if a gradient reaches an output of it and something in it wants one."""
    differentiable = {value.name for value in graph.values if value.requires_grad}
    reached = {graph.loss}
    has_backward = [False] * len(graph.regions)
    for index in reversed(range(len(graph.regions))):
        region = graph.regions[index]
        wanted = [name for name in region.inputs if name in differentiable]
        arrives = any(name in reached and name in differentiable for name in region.outputs)
        has_backward[index] = arrives and bool(wanted or region.gradients)
        if has_backward[index]:
            reached.update(wanted)
    return has_backward


def _planned_regions(graph: RegionGraph, costs: Costs, has_backward: list[bool]) -> tuple[PlannedRegion, ...]:
    by_kind = {cost.kind: cost for cost in costs.regions}
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    regions = []
    for index, region in enumerate(graph.regions):
        if region.kind not in by_kind:
            raise ArtifactError(
                f"region {region.name} has kind {region.kind}, of which the costs know nothing. Profile again"
            )
        used = [_known(parameters, name, region) for name in dict.fromkeys(region.parameters)]
        regions.append(
            PlannedRegion(
                index=index,
                name=region.name,
                inputs=tuple(dict.fromkeys(region.inputs)),
                outputs=tuple(dict.fromkeys(region.outputs)),
                weights=tuple(parameter.name for parameter in used if parameter.role == "parameter"),
                persistent=tuple(parameter.name for parameter in used if parameter.role != "parameter"),
                mutates=tuple(region.mutates),
                gradients=tuple(region.gradients) if has_backward[index] else (),
                backward=has_backward[index],
                checkpoint=region.checkpoint >= 0,
                cost=by_kind[region.kind],
            )
        )
    return tuple(regions)


def _known(parameters: dict[str, Parameter], name: str, region: Region) -> Parameter:
    if name not in parameters:
        raise ArtifactError(f"region {region.name} reads {name}, which is no parameter of the graph")
    return parameters[name]


def _planned_values(graph: RegionGraph, has_backward: list[bool]) -> dict[str, PlannedValue]:
    sizes = planned_sizes(graph)
    consumers: dict[str, list[int]] = {value.name: [] for value in graph.values}
    for index, region in enumerate(graph.regions):
        for name in dict.fromkeys(region.inputs):
            if name not in consumers:
                raise ArtifactError(f"region {region.name} reads {name}, which is no value of the graph")
            consumers[name].append(index)
    shared = Counter(value.alias_set for value in graph.values if value.alias_set >= 0)
    planned = {}
    for value in graph.values:
        size_bytes = storage_bytes(value.spec, sizes)
        readers = tuple(consumers[value.name])
        if readers and readers[0] <= value.producer:
            raise ArtifactError(f"value {value.name} is read by region {readers[0]} before it is made")
        backward = tuple(index for index in readers if has_backward[index])
        inner = value.producer >= 0
        planned[value.name] = PlannedValue(
            name=value.name,
            bytes=size_bytes,
            dtype=value.spec.dtype,
            producer=value.producer,
            consumers=readers,
            backward_consumers=backward,
            receives_gradient=(
                inner and value.requires_grad and bool(backward) and has_backward[value.producer]
            ),
            # views of one storage end only together, so that moving one of them frees nothing
            movable=inner and bool(backward) and size_bytes > 0 and shared[value.alias_set] <= 1,
        )
    return planned


def _planned_parameters(
    graph: RegionGraph, costs: Costs, has_backward: list[bool]
) -> dict[str, PlannedParameter]:
    uses: dict[str, list[int]] = {parameter.name: [] for parameter in graph.parameters}
    gradients: dict[str, list[int]] = {parameter.name: [] for parameter in graph.parameters}
    for index, region in enumerate(graph.regions):
        for name in dict.fromkeys(region.parameters):
            _append(uses, name, index, region)
        for name in dict.fromkeys(region.gradients if has_backward[index] else ()):
            _append(gradients, name, index, region)
    planned = {}
    for parameter in graph.parameters:
        if parameter.role != "parameter":
            continue
        name = parameter.name
        backward = tuple(index for index in uses[name] if has_backward[index])
        planned[name] = PlannedParameter(
            name=name,
            elements=element_count(parameter.spec, planned_sizes(graph)),
            dtype=parameter.spec.dtype,
            uses=tuple(uses[name]),
            backward_uses=backward,
            gradient_regions=tuple(gradients[name]),
            update_region=min((*backward, *gradients[name])) if gradients[name] else -1,
            pieces=_pieces(graph, costs, parameter) if gradients[name] else (),
        )
    return planned


def _append(table: dict[str, list[int]], name: str, index: int, region: Region) -> None:
    if name not in table:
        raise ArtifactError(f"region {region.name} names {name}, which is no parameter of the graph")
    table[name].append(index)


def _pieces(graph: RegionGraph, costs: Costs, parameter: Parameter) -> tuple[Piece, ...]:
    if parameter.name not in costs.optimizer.states:
        raise ArtifactError(
            f"costs know no optimizer state of {parameter.name}, which receives a gradient. Profile again"
        )
    pieces = [
        Piece("state", spec.name, spec.elements, spec.dtype)
        for spec in costs.optimizer.states[parameter.name]
    ]
    if parameter.spec.dtype in _HALF_PRECISION:
        elements = element_count(parameter.spec, planned_sizes(graph))
        pieces.append(Piece("master", "", elements, "float32"))
    return tuple(pieces)
