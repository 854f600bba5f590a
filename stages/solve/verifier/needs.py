"""What the graph asks of a program: reads, gradients and sizes, derived from the graph itself."""

from __future__ import annotations

from stages.artifacts.costs import Costs, RegionCost
from stages.artifacts.graph import (
    BYTES_PER_ELEMENT,
    RegionGraph,
    element_count,
    planned_sizes,
    storage_bytes,
)
from stages.artifacts.plan import Buffer, Plan
from stages.solve.errors import PlanError


class GraphFacts:
    """Facts of a graph and its costs.

    has_backward: by region. reached: values that get a gradient which a backward reads.
    update_after: parameter -> regions whose backward must be done before it is updated.
    gradient_senders: parameter -> regions whose backward sends it a gradient, ascending.
    """

    def __init__(self, graph: RegionGraph, costs: Costs) -> None:
        self.graph, self.costs = graph, costs
        self.parameters = {parameter.name: parameter for parameter in graph.parameters}
        self.values = {value.name: value for value in graph.values}
        self._costs = {cost.kind: cost for cost in costs.regions}
        self.has_backward = [False] * len(graph.regions)
        wanted: set[str] = {graph.loss}
        for index in range(len(graph.regions) - 1, -1, -1):
            region = graph.regions[index]
            targets = {name for name in region.inputs if self.values[name].requires_grad}
            if any(name in wanted and self.values[name].requires_grad for name in region.outputs):
                self.has_backward[index] = bool(targets or region.gradients)
            if self.has_backward[index]:
                wanted |= targets
        self.reached = {
            name
            for index, region in enumerate(graph.regions)
            if self.has_backward[index]
            for name in region.inputs
            if self._sends_back(name)
        }
        self.update_after: dict[str, set[int]] = {}
        self.gradient_senders: dict[str, list[int]] = {}
        for name in self.parameters:
            senders = [i for i, region in enumerate(graph.regions) if self._sends(i, name)]
            readers = {i for i, region in enumerate(graph.regions) if name in region.parameters}
            self.gradient_senders[name] = senders
            self.update_after[name] = {i for i in {*readers, *senders} if self.has_backward[i]}

    def _sends(self, region: int, name: str) -> bool:
        return self.has_backward[region] and name in self.graph.regions[region].gradients

    def _sends_back(self, name: str) -> bool:
        value = self.values[name]
        return value.requires_grad and value.producer >= 0 and self.has_backward[value.producer]

    def is_shared(self, role: str, owner: str) -> bool:
        """Whether a buffer is the same for all micro-batches: weights, and the batch they are cut from."""
        if role in ("value", "value_gradient"):
            return self.values[owner].producer < 0
        return role != "saved"

    def cost_of(self, region: int) -> RegionCost:
        return self._costs[self.graph.regions[region].kind]

    def inputs_of(self, region: int, *, moved_only: bool = False) -> set[tuple[str, str]]:
        """Buffers that a region reads. moved_only: without model buffers, which a recompute and a
        backward find as they were at the forward."""
        found = {("value", name) for name in self.graph.regions[region].inputs}
        for name in self.graph.regions[region].parameters:
            if self.parameters[name].role == "parameter":
                found.add(("weight", name))
            elif not moved_only:
                found.add(("persistent", name))
        return found

    def gradient_inputs(self, region: int) -> list[str]:
        return [name for name in self.graph.regions[region].inputs if self._sends_back(name)]

    def weight_itemsize(self, name: str) -> int:
        return BYTES_PER_ELEMENT[self.parameters[name].spec.dtype]

    def elements(self, name: str) -> int:
        return element_count(self.parameters[name].spec, planned_sizes(self.graph))

    def check_sizes(self, plan: Plan) -> None:
        """Buffers are as large as what they hold.

        Raises:
            PlanError: One is not.
        """
        regions = {region.name: index for index, region in enumerate(self.graph.regions)}
        inputs = {item.name for item in self.graph.values}
        for buffer in plan.buffers:
            if buffer.role in ("value", "value_gradient") and buffer.owner not in inputs:
                continue  # of the evaluation graph
            expected = self._expected_bytes(buffer, regions)
            if buffer.bytes < expected:
                raise PlanError(
                    f"buffer {buffer.id} ({buffer.role} of {buffer.owner}) has {buffer.bytes} bytes; "
                    f"expected {expected}"
                )

    def _expected_bytes(self, buffer: Buffer, regions: dict[str, int]) -> int:
        if buffer.role == "saved":
            return self.cost_of(regions[buffer.owner]).saved_bytes
        if buffer.role in ("value", "value_gradient"):
            return 0 if buffer.resident else self._value_bytes(buffer.owner)
        if buffer.owner not in self.parameters:
            raise PlanError(f"buffer {buffer.id}: {buffer.owner} is no parameter of the graph")
        if buffer.role == "persistent":
            return storage_bytes(self.parameters[buffer.owner].spec, planned_sizes(self.graph))
        if buffer.role in ("weight", "gradient", "partial_gradient"):
            return (buffer.count or self.elements(buffer.owner)) * self.weight_itemsize(buffer.owner)
        return buffer.count * BYTES_PER_ELEMENT[buffer.dtype]

    def _value_bytes(self, name: str) -> int:
        return storage_bytes(self.values[name].spec, planned_sizes(self.graph))
