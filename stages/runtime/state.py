"""Where every byte of the training state is: slots in the arena, live tensors, extents on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from stages.artifacts import graph as g
from stages.artifacts.plan import Buffer, Plan
from stages.device.interface import Device
from stages.region import operators
from stages.region.autograd import Span, Tape
from stages.runtime.tiers.arena import Arena


@dataclass(frozen=True)
class Layout:
    """How a tensor that is away reads its bytes."""

    span: Span

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        return Layout(Span.of(tensor))

    def new_tensor(self, device: Device) -> torch.Tensor:
        return self.span.view(device.new_storage(self.span.bytes), 0)


@dataclass(frozen=True)
class MicroBatch:
    """A slice of a step's batch: its tensors by input name, its sizes, and the factor with which its
    loss counts in the step's loss (1 where the slice is all)."""

    inputs: Mapping[str, torch.Tensor]
    sizes: dict[str, int]
    weight: float = 1.0
    #: no row at all: nothing is computed for it
    empty: bool = False


@dataclass(frozen=True)
class Draws:
    """The default generator's state before and after a region's forward."""

    before: torch.Tensor
    after: torch.Tensor


@dataclass
class MicroState:
    """What a micro-batch leaves between its regions' turns."""

    batch: MicroBatch
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    value_gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    #: of weights, from regions that have gone backward, until the last of them has
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    tapes: dict[int, Tape] = field(default_factory=dict)
    #: bytes of each saved storage of a region, in order, while they are on disk
    saved_away: dict[int, list[int]] = field(default_factory=dict)
    #: generator state before the first forward of a region that will be recomputed
    rng: dict[int, torch.Tensor] = field(default_factory=dict)
    #: buffers that a region mutates, as they were before its forward
    buffers_before: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    #: what the model returns, in an evaluation
    returned: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class StepState:
    """What exists within one step only."""

    micro: list[MicroState] = field(default_factory=list)
    #: random numbers of (micro-batch, region), where the program's order is not a plain loop's
    draws: dict[tuple[int, int], Draws] = field(default_factory=dict)
    #: of weights, added up over micro-batches
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    #: layouts of values and gradients that were written to disk
    away: dict[int, Layout] = field(default_factory=dict)
    #: parameters whose gradient is complete: its 2-norm (still scaled)
    norms: dict[str, float] = field(default_factory=dict)
    #: parameters with an inf or nan in their gradient, in the order found
    non_finite: list[str] = field(default_factory=list)


class TrainingState:
    """Slots of all planned buffers, and the model's own buffers.

    Args:
        graph: The traced model.
        plan: Its plan; every planned buffer has an offset in `arena`.
        arena: Memory of `plan.arena_bytes`.
    """

    def __init__(self, graph: g.RegionGraph, plan: Plan, arena: Arena) -> None:
        self.parameters = {parameter.name: parameter for parameter in graph.parameters}
        self.buffers = {buffer.id: buffer for buffer in plan.buffers}
        self._slots: dict[int, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        #: model buffers and constants; they never move
        self.persistent: dict[str, torch.Tensor] = {}
        #: completed updates of each parameter, which bias corrections read
        self.update_counts: dict[str, int] = {}
        for buffer in plan.buffers:
            if buffer.offset is not None:
                self._add_slot(buffer, arena)

    def _add_slot(self, buffer: Buffer, arena: Arena) -> None:
        parameter = self.parameters.get(buffer.owner)
        assert parameter is not None, f"planned buffer {buffer.id} belongs to no parameter"
        assert buffer.offset is not None, f"buffer {buffer.id} has no slot"
        dtype = operators.dtype(buffer.dtype)
        count = buffer.count or numel(parameter.spec)
        if buffer.role == "weight" and count == numel(parameter.spec):
            shape, stride = integers(parameter.spec.shape), integers(parameter.spec.stride)
            self.weights[buffer.owner] = arena.slot(buffer.offset, shape, stride, dtype)
        self._slots[buffer.id] = arena.slot(buffer.offset, (count,), (1,), dtype)

    def slot(self, buffer: Buffer) -> torch.Tensor:
        """The flat tensor of a planned buffer."""
        return self._slots[buffer.id]

    def of_parameter(self, name: str, role: str) -> Iterator[Buffer]:
        for buffer in self.buffers.values():
            if buffer.owner == name and buffer.role == role:
                yield buffer


def numel(spec: g.TensorSpec) -> int:
    """Elements of a parameter; parameters have no symbolic sizes."""
    return g.element_count(spec, {})


def integers(sizes: list[g.Size]) -> tuple[int, ...]:
    """Sizes of a parameter, which have no symbols."""
    return tuple(g.evaluate_size(size, {}) for size in sizes)


def in_order_of(tensor: torch.Tensor, spec: g.TensorSpec) -> torch.Tensor:
    """`tensor` with the strides of a parameter of spec `spec`; itself where it has them already."""
    stride = integers(spec.stride)
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.size(), stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def flat(tensor: torch.Tensor, spec: g.TensorSpec) -> torch.Tensor:
    """The elements of `tensor` in the storage order of a parameter of spec `spec`, as one dimension."""
    ordered = in_order_of(tensor, spec)
    return ordered.as_strided((ordered.numel(),), (1,), ordered.storage_offset())
