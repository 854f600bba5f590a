"""What the planner needs of a graph and its costs, in bytes, nanoseconds and region indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.artifacts.costs import LinkCost, OptimizerCost, RegionCost
from stages.artifacts.graph import (
    BYTES_PER_ELEMENT,
)
from stages.artifacts.plan import ALIGNMENT
from stages.artifacts.slicing import HORIZONTAL, VERTICAL


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to what offsets and transfers are multiples of."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """One tensor that the optimizer keeps of a parameter: a state, or the fp32 master."""

    role: str  # "state" | "master"
    state: str
    elements: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def itemsize(self) -> int:
        return BYTES_PER_ELEMENT[self.dtype]


@dataclass(frozen=True)
class PlannedParameter:
    """A weight. Region indices are ascending.

    update_region: the region after whose backward the weight is read no more and its gradient is
    complete; -1 when it never receives a gradient.
    """

    name: str
    elements: int
    dtype: str
    uses: tuple[int, ...]
    backward_uses: tuple[int, ...]
    gradient_regions: tuple[int, ...]
    update_region: int
    pieces: tuple[Piece, ...]

    @property
    def itemsize(self) -> int:
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def has_master(self) -> bool:
        return any(piece.role == "master" for piece in self.pieces)

    @property
    def updated(self) -> bool:
        return self.update_region >= 0


@dataclass(frozen=True)
class PersistentBuffer:
    """A model buffer or constant: always on the device."""

    name: str
    bytes: int
    dtype: str


@dataclass(frozen=True)
class PlannedValue:
    """A tensor between regions.

    receives_gradient: some backward sends it a gradient and another one reads it.
    """

    name: str
    bytes: int
    dtype: str
    producer: int
    consumers: tuple[int, ...]
    backward_consumers: tuple[int, ...]  # those with a backward: they need it until then
    receives_gradient: bool
    movable: bool


@dataclass(frozen=True)
class PlannedRegion:
    index: int
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]
    persistent: tuple[str, ...]
    mutates: tuple[str, ...]
    gradients: tuple[str, ...]  # weights that receive one here
    backward: bool
    checkpoint: bool
    cost: RegionCost

    @property
    def saved_extent_bytes(self) -> int:
        """Bytes on disk of what autograd keeps: each storage starts on its own boundary."""
        return sum(align(size) for size in self.cost.saved_storages) or align(self.cost.saved_bytes)


@dataclass(frozen=True)
class HostTier:
    """Host memory between an accelerator and the disk.

    capacity_bytes: what there is; fixed_bytes: of it, what every plan needs. far_read, far_write: links
    of what waits on disk, through a bounce buffer in host memory.
    """

    capacity_bytes: int
    fixed_bytes: int
    far_read: LinkCost
    far_write: LinkCost

    @property
    def room_bytes(self) -> int:
        return self.capacity_bytes - self.fixed_bytes


@dataclass(frozen=True)
class Turn:
    """One region's turn on the compute lane, forward or backward, with one micro-batch."""

    region: int
    micro_batch: int
    forward: bool


@dataclass(frozen=True)
class Problem:
    """A graph and its costs, reduced to what planning reads: sizes and costs of one micro-batch.

    micro_batch_order: see `Placement`.
    """

    precision: str
    device: str
    regions: tuple[PlannedRegion, ...]
    values: dict[str, PlannedValue]
    parameters: dict[str, PlannedParameter]
    persistent: dict[str, PersistentBuffer]
    read: LinkCost
    write: LinkCost
    optimizer: OptimizerCost
    baseline_bytes: int
    stage_peak_bytes: int
    allocator_overhead_ppm: int
    #: the largest initial value, which is made whole before the first step
    initial_bytes: int = 0
    #: None: the device tier is host memory, and the next one the disk
    host: HostTier | None = None
    micro_batches: int = 1
    micro_batch_order: str = VERTICAL
    #: updates wait until all gradients are known
    defers_update: bool = False
    #: gradients are scaled to a norm
    clips: bool = False
    #: batches of one step
    accumulate: int = 1
    #: values that the model returns, which an evaluation keeps to its end
    returned: tuple[str, ...] = ()

    def link(self, lane: str, home: str) -> LinkCost:
        """The link of a transfer on `lane` ("read" | "write") of a buffer whose home is `home`."""
        if self.host is not None and home == "disk":
            return self.host.far_read if lane == "read" else self.host.far_write
        return self.read if lane == "read" else self.write

    @cached_property
    def updated(self) -> tuple[PlannedParameter, ...]:
        """Parameters that receive a gradient, in the order in which it becomes complete."""
        found = [parameter for parameter in self.parameters.values() if parameter.updated]
        return tuple(sorted(found, key=lambda parameter: -parameter.update_region))

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        """Who runs in which slot of a step.

        With one micro-batch: every forward, then every backward. Vertically, the regions of the tail
        go forward and backward with each micro-batch in turn, so that what they make (the logits)
        need not wait.
        """
        regions, together = range(len(self.regions)), range(self.micro_batches)
        if self.micro_batch_order == HORIZONTAL:
            passes = [(regions, [batch]) for batch in together]
        else:
            passes = [(regions, list(together))]
        return tuple(turn for names, batches in passes for turn in _turns_of(names, batches, self.tail))

    @cached_property
    def tail(self) -> int:
        """The first region of the tail: as long as the values that enter it are larger than those that
        enter the region before, it begins there (the head and the loss, whose logits are wide)."""
        first = max(0, len(self.regions) - 1)
        while first > 0 and self._entering_bytes(first) > self._entering_bytes(first - 1):
            first -= 1
        return first

    def _entering_bytes(self, region: int) -> int:
        return sum(
            value.bytes
            for value in self.values.values()
            if 0 <= value.producer < region and value.consumers and value.consumers[-1] >= region
        )

    @property
    def stays_in_tail(self) -> bool:
        """Whether micro-batches pass the tail one after another, and its weights stay for all of them."""
        return self.micro_batches > 1 and self.micro_batch_order == VERTICAL

    @property
    def slots(self) -> int:
        return len(self.turns)

    @cached_property
    def _slot_of(self) -> dict[tuple[int, int, bool], int]:
        return {(turn.region, turn.micro_batch, turn.forward): slot for slot, turn in enumerate(self.turns)}

    @cached_property
    def completed_in(self) -> dict[int, tuple[PlannedParameter, ...]]:
        """Region -> parameters whose gradient is complete after its backward, in order of their update."""
        found: dict[int, list[PlannedParameter]] = {}
        for parameter in self.updated:
            found.setdefault(parameter.update_region, []).append(parameter)
        return {region: tuple(parameters) for region, parameters in found.items()}

    @property
    def last_micro_batch(self) -> int:
        return self.micro_batches - 1

    @property
    def distances(self) -> int:
        """Prefetch distances that may be chosen: of each region forward, then of each backward, in
        the order of their turns."""
        return 2 * len(self.regions)

    def distance_of(self, region: int, *, forward: bool) -> int:
        """Which of the distances is that of a region's turns in one direction."""
        return region if forward else self.distances - 1 - region

    def lead_slots(self, regions: int) -> int:
        """Slots in which that many regions have their turns with all micro-batches that pass together."""
        return regions * (self.micro_batches if self.micro_batch_order == VERTICAL else 1)

    @cached_property
    def last_backward(self) -> int:
        """The region whose backward follows its forward with nothing between: giving up its activations
        frees nothing. -1 where there is none."""
        last = max((region.index for region in self.regions if region.backward), default=-1)
        apart = [
            self.backward_slot(last, batch) - self.forward_slot(last, batch)
            for batch in range(self.micro_batches if last >= 0 else 0)
        ]
        return last if max(apart, default=1) == 1 else -1

    @property
    def accumulates(self) -> bool:
        """Whether a phase "accumulate" finds gradients to add to."""
        return self.accumulate > 1

    def as_allocated(self, size_bytes: int) -> int:
        """`size_bytes` of live tensors outside the arena as the allocator holds them."""
        return size_bytes + -(-size_bytes * self.allocator_overhead_ppm // 10**6)

    def forward_slot(self, region: int, micro_batch: int = 0) -> int:
        return self._slot_of[region, micro_batch, True]

    def backward_slot(self, region: int, micro_batch: int = 0) -> int:
        return self._slot_of[region, micro_batch, False]

    def update_slot(self, region: int) -> int:
        """The slot after which gradients that are complete in `region` have their sum over all
        micro-batches."""
        return self.backward_slot(region, self.last_micro_batch)


def _turns_of(regions: range, batches: Sequence[int], tail: int) -> Iterator[Turn]:
    """The turns of micro-batches that pass together."""
    for region in regions[:tail]:
        yield from (Turn(region, batch, True) for batch in batches)
    for batch in batches:
        yield from (Turn(region, batch, True) for region in regions[tail:])
        yield from (Turn(region, batch, False) for region in reversed(regions[tail:]))
    for region in reversed(regions[:tail]):
        yield from (Turn(region, batch, False) for batch in batches)
