"""Phase "step": forward and backward of every region, and the updates that may run inside."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from stages.artifacts.plan import Placement
from stages.solve.lowering.buffers import BufferTable
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.lowering.reads import QueuedRead, ReadAhead
from stages.solve.lowering.update import Unit, UpdateStream, reads_of, units_of
from stages.solve.lowering.windows import windows
from stages.solve.problem import PlannedParameter, PlannedRegion, PlannedValue, Problem, Turn


class Schedule:
    """What begins and ends in which region slot.

    weights: slot -> (slot of the use, weight), read before the slot's compute.
    fetches: the same of tensors outside the arena.
    ends: slot -> buffers that end with the slot's forward or backward.
    late_ends: slot -> buffers on their way to disk, which must have left before the slot begins.
    """

    def __init__(self) -> None:
        self.weights: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.fetches: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self.ends: dict[int, list[int]] = defaultdict(list)
        self.late_ends: dict[int, list[int]] = defaultdict(list)
        #: buffers that are written to disk once made
        self.stores: set[int] = set()


def weight_uses(problem: Problem, parameter: PlannedParameter) -> list[int]:
    """Slots that read a weight, of all micro-batches. Between its uses in the tail it stays."""
    slots = [
        slot
        for batch in range(problem.micro_batches)
        for slot in _slots(problem, parameter.uses, parameter.backward_uses, batch)
    ]
    tail = [slot for slot in slots if problem.turns[slot].region >= problem.tail]
    if problem.stays_in_tail and tail:
        slots += range(min(tail), max(tail))
    return sorted(set(slots))


def value_uses(problem: Problem, value: PlannedValue, micro_batch: int = 0) -> list[int]:
    """Slots that make or read a micro-batch's value. A region's inputs are needed until its backward:
    autograd keeps handles to them, and a recompute reads them."""
    made = [value.producer] if value.producer >= 0 else []
    return sorted(_slots(problem, (*made, *value.consumers), value.backward_consumers, micro_batch))


def _slots(
    problem: Problem, forward: Iterable[int], backward: Iterable[int], micro_batch: int
) -> Iterator[int]:
    yield from (problem.forward_slot(region, micro_batch) for region in forward)
    yield from (problem.backward_slot(region, micro_batch) for region in backward)


def saved_uses(problem: Problem, region: int, micro_batch: int = 0) -> list[int]:
    """Slots that make and read what autograd keeps of a region."""
    return [problem.forward_slot(region, micro_batch), problem.backward_slot(region, micro_batch)]


def lead_of(problem: Problem, placement: Placement) -> Callable[[int], int]:
    """How many slots before the use in a slot its fetch may start."""
    back = placement.prefetch_backward or placement.prefetch

    def lead(slot: int) -> int:
        turn = problem.turns[slot]
        return placement.prefetch[turn.region] if turn.forward else back[turn.region]

    return lead


def weight_lead_of(problem: Problem, placement: Placement) -> Callable[[int], int]:
    """The same for weights, which wait for all micro-batches that pass a region together."""
    lead = lead_of(problem, placement)
    return lambda slot: problem.lead_slots(lead(slot))


def build_schedule(problem: Problem, placement: Placement, table: BufferTable) -> Schedule:
    schedule = Schedule()
    lead = lead_of(problem, placement)
    weight_lead = weight_lead_of(problem, placement)
    for name in problem.parameters:
        if name in table.streamed:
            _schedule_weight(schedule, problem, placement, table, problem.parameters[name], weight_lead)
    for batch in range(problem.micro_batches):
        for value in problem.values.values():
            if value.producer >= 0:
                buffer = table.value(value.name, batch)
                moves = table.buffers[buffer].extent is not None
                lag = placement.prefetch[value.producer]
                uses = value_uses(problem, value, batch)
                _schedule_dynamic(schedule, buffer, uses, lead, lag, moves=moves)
        for region in problem.regions:
            saved = table.saved(region.index, batch)
            if region.backward and table.buffers[saved].extent is not None:
                uses = saved_uses(problem, region.index, batch)
                lag = placement.prefetch[region.index]
                _schedule_dynamic(schedule, saved, uses, lead, lag, moves=True)
    return schedule


def _schedule_weight(
    schedule: Schedule,
    problem: Problem,
    placement: Placement,
    table: BufferTable,
    parameter: PlannedParameter,
    lead: Callable[[int], int],
) -> None:
    buffer = table.weight(parameter)
    if placement.moving_bytes:
        stays = windows(weight_uses(problem, parameter), lambda _: 0, placement.hold)
    else:
        stays = windows(weight_uses(problem, parameter), lead)
    for stay in stays:
        schedule.weights[stay.fetch].append((stay.first, buffer))
    updated_in_place = parameter.updated and not parameter.has_master and placement.gradients == "consume"
    for stay in stays[:-1] if updated_in_place else stays:
        schedule.ends[stay.last].append(buffer)


def _schedule_dynamic(
    schedule: Schedule, buffer: int, uses: list[int], lead: Callable[[int], int], lag: int, *, moves: bool
) -> None:
    """A buffer that its first use makes and its last one ends; between, it may wait on disk."""
    stays = windows(uses, lead, lag) if moves else []
    for stay in stays[1:]:
        schedule.fetches[stay.fetch].append((stay.first, buffer))
    for stay in stays[:-1]:
        schedule.late_ends[stay.last + 1 + lag].append(buffer)
    if len(stays) > 1:
        schedule.stores.add(buffer)
    schedule.ends[uses[-1]].append(buffer)


class StepLowering:
    """Writes the phase down, slot by slot.

    Args:
        further: Phase "accumulate": gradients of batches before are there, in memory or on disk.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        table: BufferTable,
        draft: PhaseDraft,
        *,
        further: bool = False,
    ) -> None:
        self._further = further
        self._problem = problem
        self._placement = placement
        self._table = table
        self._draft = draft
        self._schedule = build_schedule(problem, placement, table)
        if further and placement.gradients == "move":
            for parameter in problem.updated:
                slot = problem.backward_slot(min(parameter.gradient_regions), 0)
                self._schedule.fetches[slot].append((slot, table.gradient(parameter)))
        consumed = placement.gradients == "consume"
        units = [
            unit
            for parameter in (problem.updated if consumed else ())
            for unit in units_of(problem, placement, table, parameter, deferred=False)
        ]
        self._reads = self._read_ahead(units) if placement.moving_bytes else None
        self._updates = UpdateStream(problem, draft, units, placement.chunk_slots - 1, self._reads)
        self._written: dict[int, int] = {}

    def _read_ahead(self, units: list[Unit]) -> ReadAhead:
        """All fetches of slots: weights before their region's turn, chunks before their update."""
        reads = [
            QueuedRead((buffer,), (first, 0, 0))
            for weights in self._schedule.weights.values()
            for first, buffer in weights
        ]
        reads += reads_of(self._problem, units)
        reads.sort(key=lambda read: read.order)
        return ReadAhead(self._draft, self._table.buffers, reads, self._placement.moving_bytes)

    def run(self) -> None:
        for slot, turn in enumerate(self._problem.turns):
            region = self._problem.regions[turn.region]
            self._begin(slot)
            if turn.forward:
                self._forward(region, turn.micro_batch, slot)
            elif region.backward:
                if self._leads_to_updates(turn):
                    self._updates.fetch_ahead()
                self._backward(region, turn.micro_batch, slot)
                if turn.micro_batch == self._problem.last_micro_batch:
                    self._complete_gradients(region, slot)
        for slot in sorted(self._schedule.late_ends):
            if slot >= self._problem.slots:
                self._vacate(slot)

    def _leads_to_updates(self, turn: Turn) -> bool:
        """Whether updates follow this backward with none of another region between."""
        together = self._problem.stays_in_tail and turn.region < self._problem.tail
        return together or turn.micro_batch == self._problem.last_micro_batch

    def _begin(self, slot: int) -> None:
        self._vacate(slot)
        fetches = sorted(self._schedule.fetches[slot])
        if self._reads is None:
            for _, buffer in sorted([*self._schedule.weights[slot], *fetches]):
                self._fetch(buffer)
            return
        self._reads.require((slot, 0, 0))
        for first, buffer in fetches:
            self._reads.until = (first, 0, 0)
            self._reads.advance()
            self._fetch(buffer)
        # what the next slot fetches goes before what is used after that
        later = self._schedule.fetches[slot + 1]
        self._reads.until = (min(later)[0], 0, 0) if later else None
        self._reads.advance()

    def _fetch(self, buffer: int) -> None:
        self._draft.fetch(buffer, outside_arena=self._table.buffers[buffer].offset is None)

    def _vacate(self, slot: int) -> None:
        leaving = self._schedule.late_ends[slot]
        if leaving:
            self._draft.compute("free", frees=leaving, after=[self._written[buffer] for buffer in leaving])

    def _store(self, buffers: list[int]) -> None:
        for buffer in buffers:
            self._written[buffer] = self._draft.write(buffer, free=False)

    def _forward(self, region: PlannedRegion, batch: int, slot: int) -> None:
        table, cost = self._table, region.cost
        keep = region.backward and self._placement.regions[region.index].activations != "recompute"
        outputs = [table.value(name, batch) for name in region.outputs]
        made = list(outputs)
        peak = cost.forward_peak_bytes if keep else cost.dropped_forward_peak_bytes
        if keep:
            made.append(table.saved(region.index, batch))
        made_bytes = sum(table.buffers[buffer].bytes for buffer in made)
        self._draft.compute(
            "forward",
            reads=[*self._inputs(region, batch), *self._persistent(region)],
            writes=[*made, *self._mutated(region)],
            frees=self._schedule.ends[slot],
            region=region.index,
            micro_batch=batch,
            mode="keep" if keep else "drop",
            workspace_bytes=max(0, peak - made_bytes),
        )
        self._store([buffer for buffer in made if buffer in self._schedule.stores])

    def _inputs(self, region: PlannedRegion, batch: int) -> list[int]:
        """Values and weights that a region reads, forward and backward."""
        weights = [self._table.weight(self._problem.parameters[name]) for name in region.weights]
        return [*(self._table.value(name, batch) for name in region.inputs), *weights]

    def _persistent(self, region: PlannedRegion) -> list[int]:
        return [self._table.persistent(name) for name in region.persistent]

    def _mutated(self, region: PlannedRegion) -> list[int]:
        return [self._table.persistent(name) for name in region.mutates]

    def _backward(self, region: PlannedRegion, batch: int, slot: int) -> None:
        table, cost, draft = self._table, region.cost, self._draft
        saved, inputs = table.saved(region.index, batch), self._inputs(region, batch)
        if self._placement.regions[region.index].activations == "recompute":
            draft.compute(
                "recompute",
                reads=inputs,
                writes=[saved],
                region=region.index,
                micro_batch=batch,
                workspace_bytes=max(0, cost.forward_peak_bytes - cost.saved_bytes),
            )
        received = self._value_gradients(region.outputs, batch)
        sent, joined = self._gradients(region, batch)
        sent = [*self._value_gradients(region.inputs, batch), *sent]
        sums = [buffer for buffer in sent if draft.is_present(buffer)]
        new_bytes = sum(table.buffers[buffer].bytes for buffer in sent if buffer not in sums)
        saved_ends = [] if saved in self._schedule.ends[slot] else [saved]
        draft.compute(
            "backward",
            reads=[saved, *inputs, *received, *sums, *joined],
            writes=sent,
            frees=[*self._schedule.ends[slot], *saved_ends, *received, *joined],
            region=region.index,
            micro_batch=batch,
            workspace_bytes=max(0, cost.backward_peak_bytes - new_bytes),
        )

    def _value_gradients(self, names: Iterable[str], batch: int) -> list[int]:
        return [
            self._table.value_gradient(name, batch)
            for name in names
            if self._problem.values[name].receives_gradient
        ]

    def _gradients(self, region: PlannedRegion, batch: int) -> tuple[list[int], list[int]]:
        """Gradients of weights that a backward adds to, and partial ones that it completes."""
        sent, joined = [], []
        for name in region.gradients:
            parameter = self._problem.parameters[name]
            partial = self._table.partial_gradient(parameter, batch, further=self._further)
            last = region.index == min(parameter.gradient_regions)
            sent.append(self._table.gradient(parameter) if last else partial)
            if last and partial != sent[-1]:
                joined.append(partial)
        return sent, joined

    def _complete_gradients(self, region: PlannedRegion, slot: int) -> None:
        for parameter in self._problem.completed_in.get(region.index, ()):
            gradient = self._table.gradient(parameter)
            if self._placement.gradients == "consume":
                self._updates.run(parameter.name)
            elif self._placement.gradients == "move":
                self._store([gradient])
                lag = self._placement.prefetch[region.index]
                self._schedule.late_ends[slot + 1 + lag].append(gradient)
                if not self._further:
                    self._draft.leaving.add(gradient)
