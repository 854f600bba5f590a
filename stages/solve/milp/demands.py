"""What each choice asks of every position of a step: memory, compute, bytes to read and to write."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from stages.solve.choice import CHUNK_SIZES, Choice, everything_resident
from stages.solve.estimate import Change, Estimator
from stages.solve.lowering.windows import Window
from stages.solve.milp.linear import Expression, LinearProgram, Term
from stages.solve.milp.transit import Flow
from stages.solve.milp.units import BYTES_PER_MB, NS_PER_MS
from stages.solve.pace import whole_pieces
from stages.solve.problem import PlannedRegion, align


@dataclass
class Variables:
    """What the model decides. Each is an index into the program's variables.

    weights: per weight group, 1 where it streams.
    held: (weight group, use) -> share that stays on the device from the use before to this one.
    state: per state group, the share of its optimizer state that streams.
    recompute, move: region -> 1 where its activations are recomputed, moved.
    values: value -> 1 where it waits on disk between its uses.
    gradients: 1 where gradients wait on disk until the update phase.
    """

    weights: list[int] = field(default_factory=list)
    held: dict[tuple[int, int], int] = field(default_factory=dict)
    state: list[int] = field(default_factory=list)
    recompute: dict[int, int] = field(default_factory=dict)
    move: dict[int, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    gradients: int | None = None
    arena: int = -1


class Demands:
    """Adds the variables of all choices to a program, and sums up what they ask for.

    Attributes:
        planned, dynamic: What moves, of slots in the arena and of tensors outside it.
        late: What the update phase moves, at position 0.
        resident: Bytes in slots from the first step to the last.
        use: Bytes in slots at one position only.
        hold_change, dynamic_change: How what stays between uses, and what is outside the arena, changes at
            a position.
        work: Workspace at a position; each counts by itself.
        compute, late_compute: Milliseconds at a position, and in the update phase.
    """

    def __init__(self, estimator: Estimator, program: LinearProgram) -> None:
        self.estimator = estimator
        self.problem = estimator.problem
        self.program = program
        self.variables = Variables()
        self.deferred = self.problem.defers_update
        links = (self.problem.read, self.problem.write)
        self.planned, self.dynamic, self.late = Flow(*links), Flow(*links), Flow(*links)
        self.hold_change: dict[int, Expression] = defaultdict(Expression)
        self.dynamic_change: dict[int, Expression] = defaultdict(Expression)
        self.use: dict[int, Expression] = defaultdict(Expression)
        self.work: dict[int, list[Expression]] = defaultdict(list)
        self.compute: dict[int, Expression] = defaultdict(Expression)
        self.late_compute = Expression()
        self.resident = Expression()
        self._add_weights()
        self._add_state()
        self._add_gradients()
        self._add_values()
        for region in self.problem.regions:
            self._add_region(region)
        self._add_updates()

    def _add_weights(self) -> None:
        est = self.estimator
        for index, group in enumerate(est.weights):
            streamed = self.program.variable(upper=1, integer=True)
            self.variables.weights.append(streamed)
            size = group.bytes / BYTES_PER_MB
            self.resident.add(streamed, -size)
            self.resident.constant += size
            for number, slot in enumerate(group.slots):
                self._add_weight_use(index, number, slot, streamed, size)
            last = group.slots[-1]
            if group.in_place and not self.deferred:
                # there until it is written: it counts among what is not written yet
                self.planned.make(est.ends(last), [(streamed, 1.0)], size, len(group.parameters))
            else:
                self._add_weight_pieces(index, streamed)

    def _add_weight_use(self, index: int, number: int, slot: int, streamed: int, size: float) -> None:
        """The weight is there at its use; it was read for it unless it stayed since the use before."""
        est, group = self.estimator, self.estimator.weights[index]
        here = est.begins(slot)
        self.use[here].add(streamed, size)
        if number == 0:
            self.planned.need(here, [(streamed, 1.0)], size, len(group.parameters))
            return
        before = est.begins(group.slots[number - 1])
        if slot - group.slots[number - 1] < 2:  # nothing lies between: it stays
            for position in range(before + 1, here):
                self.use[position].add(streamed, size)
            return
        held = self.variables.held[index, number] = self.program.variable(upper=1)
        self.program.at_least(Expression([(streamed, 1.0), (held, -1.0)]))
        self.planned.need(here, [(streamed, 1.0), (held, -1.0)], size, len(group.parameters))
        self.hold_change[before + 1].add(held, size)
        self.hold_change[here].add(held, -size)

    def _add_weight_pieces(self, index: int, streamed: int) -> None:
        """Where a master replaces the weight, or after backward, the new one is written in pieces."""
        for name in self.estimator.weights[index].parameters:
            parameter = self.problem.parameters[name]
            size = parameter.bytes / BYTES_PER_MB
            if not parameter.updated:
                continue
            if not self.deferred:
                position = self._update_position(parameter.update_region)
                self.planned.make(position, [(streamed, 1.0)], size, 1)
                continue
            self.late.make(0, [(streamed, 1.0)], size, 1)
            if not parameter.has_master:
                self.late.need(0, [(streamed, 1.0)], size, 1)

    def _update_position(self, region: int) -> int:
        return self.estimator.ends(self.problem.update_slot(region))

    def _add_state(self) -> None:
        chunkable = self.problem.optimizer.chunkable
        for group in self.estimator.states:
            share = self.program.variable(upper=1, integer=not chunkable)
            self.variables.state.append(share)
            parameters = [self.problem.parameters[name] for name in group.parameters]
            pieces = [
                piece
                for parameter in parameters
                for piece in (whole_pieces(parameter) if chunkable else parameter.pieces)
            ]
            moved = sum(piece.bytes for piece in pieces) / BYTES_PER_MB
            self.resident.add(share, -moved)
            # what stays in part is cut at whole blocks: rounding its slots up holds for none or all of it
            whole = sum(align(piece.bytes) for piece in pieces)
            self.resident.constant += moved + (group.bytes - whole) / BYTES_PER_MB
            flow = self.late if self.deferred else self.planned
            position = 0 if self.deferred else self._update_position(group.region)
            # a part of a chunk takes a transfer too, so a share costs at least its share of them
            transfers = sum(max(1.0, piece.elements / CHUNK_SIZES[0]) for piece in pieces)
            flow.need(position, [(share, 1.0)], moved, transfers)
            flow.make(position, [(share, 1.0)], moved, transfers)

    def _add_gradients(self) -> None:
        """Consumed inside backward; under a deferred update all kept, or all moved."""
        est = self.estimator
        for position, change in enumerate(
            _differences(est.gradient_bytes("keep" if self.deferred else "consume"))
        ):
            self.dynamic_change[position].constant += change / BYTES_PER_MB
        if not self.deferred:
            return
        moves = self.variables.gradients = self.program.variable(upper=1, integer=True)
        for parameter in self.problem.updated:
            made = est.begins(self.problem.update_slot(parameter.update_region))
            self.dynamic_change[made + 1].add(moves, -parameter.bytes / BYTES_PER_MB)
            size = parameter.bytes / BYTES_PER_MB
            self.dynamic.make(made, [(moves, 1.0)], size, 1)
            self.late.need(0, [(moves, 1.0)], size, 1)

    def _add_values(self) -> None:
        est, choice = self.estimator, everything_resident(self.problem)
        for value in self.problem.values.values():
            if not value.movable:
                continue
            moves = self.variables.values[value.name] = self.program.variable(upper=1, integer=True)
            self._add_change(est.value_change(value.name, choice, moves=False), moves, -1)
            for batch in range(self.problem.micro_batches):
                stays = est.value_windows(value.name, choice, batch)
                self._add_stays(stays, moves, value.bytes)

    def _add_stays(self, stays: list[Window], moves: int, size_bytes: int) -> None:
        """A value that moves: made and written, and read again for each of its later stays, unless it
        stays between. Once made it counts among what is not written yet."""
        est, size = self.estimator, size_bytes / BYTES_PER_MB
        if len(stays) == 1:
            self._level(est.begins(stays[0].first), est.begins(stays[0].last), moves, size)
            return
        made = est.begins(stays[0].first)
        self._level(made, made, moves, size)
        written: list[Term] = [(moves, 1.0)]
        for number, stay in enumerate(stays[1:], start=1):
            here = est.begins(stay.first)
            last = est.begins(stay.last) if number == len(stays) - 1 else est.ends(stay.last)
            self._level(here, last, moves, size)
            needed: list[Term] = [(moves, 1.0)]
            if len(stays) > 2 or self.problem.micro_batches > 1:
                held = self.program.variable(upper=1)
                self.program.at_least(Expression([(moves, 1.0), (held, -1.0)]))
                needed.append((held, -1.0))
                before = made if number == 1 else est.ends(stays[number - 1].last)
                self._level(before + 1, here - 1, held, size)
                written += [(held, -1.0)] if number == 1 else []
            self.dynamic.need(here, needed, size, 1)
        self.dynamic.make(made, written, size, 1)

    def _level(self, first: int, last: int, variable: int, size: float) -> None:
        """Megabytes of a tensor outside the arena, at positions `first` to `last`."""
        self.dynamic_change[first].add(variable, size)
        self.dynamic_change[last + 1].add(variable, -size)

    def _add_change(self, change: Change, variable: int | None, sign: float) -> None:
        for position, size in change:
            if variable is None:
                self.dynamic_change[position].constant += sign * size / BYTES_PER_MB
            else:
                self.dynamic_change[position].add(variable, sign * size / BYTES_PER_MB)

    def _add_region(self, region: PlannedRegion) -> None:
        """Activations kept, recomputed or moved: memory, workspace, compute and transfers of each."""
        usual = everything_resident(self.problem).activations[region.index]
        ways: dict[str, int | None] = {usual: None}
        recompute = move = None
        if region.backward and not region.checkpoint and region.index != self.problem.last_backward:
            recompute = self.variables.recompute[region.index] = self.program.variable(upper=1, integer=True)
            move = self.variables.move[region.index] = self.program.variable(upper=1, integer=True)
            self.program.at_least(Expression([(recompute, -1.0), (move, -1.0)]), -1.0)
            ways |= {"recompute": recompute, "move": move}
        for batch in range(self.problem.micro_batches):
            self._add_turns(region, batch, usual, recompute, move)
        self._add_memory(region, ways)

    def _add_memory(self, region: PlannedRegion, ways: dict[str, int | None]) -> None:
        """Activations and workspace of a region, for each way to treat it; None: the usual way."""
        est, choice = self.estimator, everything_resident(self.problem)
        forward, backward = Expression(), (Expression(), Expression())
        kept = self._region(region, choice, choice.activations[region.index])
        for how, variable in ways.items():
            change, forward_work, backward_work = self._region(region, choice, how)
            self._add_change(change, variable, 1)
            if variable is None:
                forward.constant += forward_work / BYTES_PER_MB
                for level, work in zip(backward, backward_work, strict=True):
                    level.constant += work / BYTES_PER_MB
                continue
            self._add_change(kept[0], variable, -1)
            forward.add(variable, (forward_work - kept[1]) / BYTES_PER_MB)
            for level, work, usual in zip(backward, backward_work, kept[2], strict=True):
                level.add(variable, (work - usual) / BYTES_PER_MB)
        for batch in range(self.problem.micro_batches):
            self.work[est.begins(self.problem.forward_slot(region.index, batch))].append(forward)
            back = est.begins(self.problem.backward_slot(region.index, batch))
            self.work[back].append(backward[batch > 0 or self.problem.accumulates])

    def _add_turns(
        self, region: PlannedRegion, batch: int, usual: str, recompute: int | None, move: int | None
    ) -> None:
        """Compute and transfers of one micro-batch."""
        there = self.estimator.begins(self.problem.forward_slot(region.index, batch))
        back = self.estimator.begins(self.problem.backward_slot(region.index, batch))
        self.compute[there].constant += region.cost.forward_ns / NS_PER_MS
        if region.backward:
            again = region.cost.forward_ns if usual == "recompute" else 0
            self.compute[back].constant += (region.cost.backward_ns + again) / NS_PER_MS
        if recompute is not None:
            self.compute[back].add(recompute, region.cost.forward_ns / NS_PER_MS)
        if move is not None:
            size = region.cost.saved_bytes / BYTES_PER_MB
            self.dynamic.make(there, [(move, 1.0)], size, 1)
            self.dynamic.need(back, [(move, 1.0)], size, 1)

    def _region(self, region: PlannedRegion, choice: Choice, how: str) -> tuple[Change, int, tuple[int, int]]:
        trial = choice.copy()
        trial.activations[region.index] = how
        return self.estimator.region_change(region, trial)

    def _add_updates(self) -> None:
        """Compute time of every update, in as few chunks as there may be."""
        optimizer = self.problem.optimizer
        freed: dict[int, int] = defaultdict(int)
        for parameter in self.problem.updated:
            chunks = -(-parameter.elements // CHUNK_SIZES[0]) if optimizer.chunkable else 1
            spent = chunks * optimizer.latency_ns + parameter.elements * 1e9 / max(
                1, optimizer.elements_per_s
            )
            where = self._update_position(parameter.update_region)
            if self.deferred:
                where = self.estimator.positions - 1
                self.late_compute.constant += spent / NS_PER_MS
            else:
                self.compute[where].constant += spent / NS_PER_MS
            # what stays in part is cut in two, so that the longest chunk may be half as long
            length = -(-parameter.elements // 2) if optimizer.chunkable else parameter.elements
            length = min(CHUNK_SIZES[-1], length) if optimizer.chunkable else length
            work = length * optimizer.workspace_bytes_per_element - freed[where]
            self.work[where].append(Expression(constant=max(0, work) / BYTES_PER_MB))
            freed[where] += parameter.bytes  # gradients that have been updated are gone


def _differences(levels: list[int]) -> list[int]:
    return [here - before for before, here in zip([0, *levels], levels, strict=False)]
