"""Variables and rows of the step's program; `docs/planner.md` has the formulation as a whole.

A step is a row of *positions*: forward of each region, then backward and update of each in reverse.
Transfers are fluid: at every position some bytes are read and written, at most what the links carry in
the position's time. What is read before its use, and what is not written yet, takes memory. Each program
that lowering makes is a point of this model with the same or a smaller objective, so the optimum of the
relaxation is a lower bound on the time of any of them.

Units: milliseconds and megabytes (10^6 bytes), which keep coefficients near one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from stages.artifacts.costs import LinkCost
from stages.artifacts.plan import bookkeeping_bytes
from stages.solve.choice import CHUNK_SIZES, SMALL_ELEMENTS, Choice, everything_resident
from stages.solve.estimate import Change, Estimator
from stages.solve.least_budget import last_backward
from stages.solve.milp.linear import Expression, LinearProgram, Term
from stages.solve.milp.traffic import Rates, Traffic, total
from stages.solve.pace import whole_pieces
from stages.solve.problem import PlannedRegion, align

NS_PER_MS = 1e6
BYTES_PER_MB = 1e6
#: transfers under this have no latency in the model
_SMALL_MB = 0.25


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


class _Flow:
    """What one tier of memory has in transit, position by position.

    demand: what must have been read when a position starts to compute; made: what a position produces
    and that must be written. Both in megabytes, latencies of the transfers included at the rate of a
    link whose other direction is busy, which they never exceed. density: the least share of true bytes
    in any of it.
    """

    def __init__(self, read: LinkCost, write: LinkCost) -> None:
        self.demand: dict[int, Expression] = defaultdict(Expression)
        self.made: dict[int, Expression] = defaultdict(Expression)
        self.density = 1.0
        self._read_latency = read.latency_ns / NS_PER_MS * Rates.least(read)
        self._write_latency = write.latency_ns / NS_PER_MS * Rates.least(write)

    def need(self, position: int, terms: list[Term], size: float, transfers: float) -> None:
        """Asks for `size` in that many transfers, times the terms."""
        full = self._with_latency(size, transfers * self._read_latency)
        self.demand[position].terms += [(variable, factor * full) for variable, factor in terms]

    def make(self, position: int, variable: int, size: float, transfers: float) -> None:
        full = self._with_latency(size, transfers * self._write_latency)
        self.made[position].add(variable, full)

    def _with_latency(self, size: float, latency: float) -> float:
        if size < _SMALL_MB:  # would drown in it, and with it what is known of memory
            return size
        self.density = min(self.density, size / (size + latency))
        return size + latency


class StepModel:
    """Builds the program for one estimator under one memory limit.

    Args:
        limit_bytes: The largest predicted peak that is allowed, the process included.
    """

    def __init__(self, estimator: Estimator, limit_bytes: int) -> None:
        self.estimator = estimator
        self.problem = estimator.problem
        self.program = LinearProgram()
        self.variables = Variables()
        self._limit_bytes = limit_bytes
        self._deferred = self.problem.defers_update
        self._traffic = Traffic(self.program, self.problem.read, self.problem.write)
        #: of slots in the arena, and of tensors outside it
        links = (self.problem.read, self.problem.write)
        self._planned, self._dynamic = _Flow(*links), _Flow(*links)
        #: changes of memory at a position: arena (what is held between uses), dynamic
        self._hold_change: dict[int, Expression] = defaultdict(Expression)
        self._dynamic_change: dict[int, Expression] = defaultdict(Expression)
        #: planned bytes at one position only
        self._use: dict[int, Expression] = defaultdict(Expression)
        self._work: dict[int, list[Expression]] = defaultdict(list)
        self._compute: dict[int, Expression] = defaultdict(Expression)
        self._late = _Flow(*links)  # the update phase
        self._late_compute = Expression()
        self._resident = Expression()
        self._build()

    @property
    def small(self) -> list[int]:
        """Variables of weights and state so small that a transfer's latency, which the model does not
        see, costs more than their memory is worth."""
        weights = zip(self.estimator.weights, self.variables.weights, strict=True)
        states = zip(self.estimator.states, self.variables.state, strict=True)
        found = [variable for group, variable in weights if group.bytes < 4 * SMALL_ELEMENTS]
        return found + [variable for group, variable in states if group.small]

    @property
    def discrete(self) -> list[int]:
        """Variables that a choice can only take at 0 or 1."""
        variables = self.variables
        found = [*variables.weights, *variables.recompute.values(), *variables.move.values()]
        found += variables.values.values()
        return found if variables.gradients is None else [*found, variables.gradients]

    def _build(self) -> None:
        self._add_weights()
        self._add_state()
        self._add_gradients()
        self._add_values()
        for region in self.problem.regions:
            self._add_region(region)
        self._add_updates()
        self.variables.arena = self.program.variable()
        dynamic = self.program.variable()
        self._add_positions(dynamic)
        self._add_update_phase(dynamic)
        self._add_limit(dynamic)

    # choices

    def _add_weights(self) -> None:
        est = self.estimator
        for index, group in enumerate(est.weights):
            streamed = self.program.variable(upper=1, integer=True)
            self.variables.weights.append(streamed)
            size = group.bytes / BYTES_PER_MB
            self._resident.add(streamed, -size)
            self._resident.constant += size
            for number, slot in enumerate(group.slots):
                self._add_weight_use(index, number, slot, streamed, size)
            last = group.slots[-1]
            if group.in_place and not self._deferred:
                self._use[est.ends(last)].add(streamed, size)
                self._planned.make(est.ends(last), streamed, size, len(group.parameters))
            else:
                self._add_weight_pieces(index, streamed)

    def _add_weight_use(self, index: int, number: int, slot: int, streamed: int, size: float) -> None:
        """The weight is there at its use; it was read for it unless it stayed since the use before."""
        est, group = self.estimator, self.estimator.weights[index]
        here = est.begins(slot)
        self._use[here].add(streamed, size)
        if number == 0:
            self._planned.need(here, [(streamed, 1.0)], size, len(group.parameters))
            return
        before = est.begins(group.slots[number - 1])
        if slot - group.slots[number - 1] < 2:  # nothing lies between: it stays
            for position in range(before + 1, here):
                self._use[position].add(streamed, size)
            return
        held = self.variables.held[index, number] = self.program.variable(upper=1)
        self.program.at_least(Expression([(streamed, 1.0), (held, -1.0)]))
        self._planned.need(here, [(streamed, 1.0), (held, -1.0)], size, len(group.parameters))
        self._hold_change[before + 1].add(held, size)
        self._hold_change[here].add(held, -size)

    def _add_weight_pieces(self, index: int, streamed: int) -> None:
        """Where a master replaces the weight, or after backward, the new one is written in pieces."""
        for name in self.estimator.weights[index].parameters:
            parameter = self.problem.parameters[name]
            size = parameter.bytes / BYTES_PER_MB
            if not parameter.updated:
                continue
            if not self._deferred:
                position = self._update_position(parameter.update_region)
                self._planned.make(position, streamed, size, 1)
                continue
            self._late.make(0, streamed, size, 1)
            if not parameter.has_master:
                self._late.need(0, [(streamed, 1.0)], size, 1)

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
            self._resident.add(share, -moved)
            self._resident.constant += group.bytes / BYTES_PER_MB
            flow = self._late if self._deferred else self._planned
            position = 0 if self._deferred else self._update_position(group.region)
            # a part of a chunk takes a transfer too, so a share costs at least its share of them
            transfers = sum(max(1.0, piece.elements / CHUNK_SIZES[0]) for piece in pieces)
            flow.need(position, [(share, 1.0)], moved, transfers)
            flow.make(position, share, moved, transfers)

    def _add_gradients(self) -> None:
        """Consumed inside backward; under a deferred update all kept, or all moved."""
        est = self.estimator
        for position, change in enumerate(
            _differences(est.gradient_bytes("keep" if self._deferred else "consume"))
        ):
            self._dynamic_change[position].constant += change / BYTES_PER_MB
        if not self._deferred:
            return
        moves = self.variables.gradients = self.program.variable(upper=1, integer=True)
        for position, change in enumerate(_differences(est.gradient_bytes("move"))):
            self._dynamic_change[position].add(moves, change / BYTES_PER_MB)
        for position, change in enumerate(_differences(est.gradient_bytes("keep"))):
            self._dynamic_change[position].add(moves, -change / BYTES_PER_MB)
        for parameter in self.problem.updated:
            size = align(parameter.bytes) / BYTES_PER_MB
            made = est.begins(self.problem.update_slot(parameter.update_region))
            self._dynamic.make(made, moves, size, 1)
            self._late.need(0, [(moves, 1.0)], size, 1)

    def _add_values(self) -> None:
        est, choice = self.estimator, everything_resident(self.problem)
        for value in self.problem.values.values():
            if not value.movable:
                continue
            moves = self.variables.values[value.name] = self.program.variable(upper=1, integer=True)
            self._add_change(est.value_change(value.name, choice, moves=True), moves, 1)
            self._add_change(est.value_change(value.name, choice, moves=False), moves, -1)
            size = align(value.bytes) / BYTES_PER_MB
            for batch in range(self.problem.micro_batches):
                stays = est.value_windows(value.name, choice, batch)
                if len(stays) > 1:
                    self._dynamic.make(est.begins(stays[0].first), moves, size, 1)
                for stay in stays[1:]:
                    self._dynamic.need(est.begins(stay.first), [(moves, 1.0)], size, 1)

    def _add_change(self, change: Change, variable: int | None, sign: float) -> None:
        for position, size in change:
            if variable is None:
                self._dynamic_change[position].constant += sign * size / BYTES_PER_MB
            else:
                self._dynamic_change[position].add(variable, sign * size / BYTES_PER_MB)

    def _add_region(self, region: PlannedRegion) -> None:
        """Activations kept, recomputed or moved: memory, workspace, compute and transfers of each."""
        est, choice = self.estimator, everything_resident(self.problem)
        usual = choice.activations[region.index]
        ways: dict[str, int | None] = {usual: None}
        recompute = move = None
        if region.backward and not region.checkpoint and region.index != last_backward(self.problem):
            recompute = self.variables.recompute[region.index] = self.program.variable(upper=1, integer=True)
            move = self.variables.move[region.index] = self.program.variable(upper=1, integer=True)
            self.program.at_least(Expression([(recompute, -1.0), (move, -1.0)]), -1.0)
            ways |= {"recompute": recompute, "move": move}
        for batch in range(self.problem.micro_batches):
            self._add_turns(region, batch, usual, recompute, move)
        forward, backward = Expression(), Expression()
        kept = self._region(region, choice, usual)
        for how, variable in ways.items():
            change, forward_work, backward_work = self._region(region, choice, how)
            self._add_change(change, variable, 1)
            if variable is None:
                forward.constant += forward_work / BYTES_PER_MB
                backward.constant += backward_work / BYTES_PER_MB
            else:
                self._add_change(kept[0], variable, -1)
                forward.add(variable, (forward_work - kept[1]) / BYTES_PER_MB)
                backward.add(variable, (backward_work - kept[2]) / BYTES_PER_MB)
        for batch in range(self.problem.micro_batches):
            self._work[est.begins(self.problem.forward_slot(region.index, batch))].append(forward)
            self._work[est.begins(self.problem.backward_slot(region.index, batch))].append(backward)

    def _add_turns(
        self, region: PlannedRegion, batch: int, usual: str, recompute: int | None, move: int | None
    ) -> None:
        """Compute and transfers of one micro-batch."""
        there = self.estimator.begins(self.problem.forward_slot(region.index, batch))
        back = self.estimator.begins(self.problem.backward_slot(region.index, batch))
        self._compute[there].constant += region.cost.forward_ns / NS_PER_MS
        if region.backward:
            again = region.cost.forward_ns if usual == "recompute" else 0
            self._compute[back].constant += (region.cost.backward_ns + again) / NS_PER_MS
        if recompute is not None:
            self._compute[back].add(recompute, region.cost.forward_ns / NS_PER_MS)
        if move is not None:
            size = region.saved_extent_bytes / BYTES_PER_MB
            self._dynamic.make(there, move, size, 1)
            self._dynamic.need(back, [(move, 1.0)], size, 1)

    def _region(self, region: PlannedRegion, choice: Choice, how: str) -> tuple[Change, int, int]:
        trial = choice.copy()
        trial.activations[region.index] = how
        return self.estimator.region_change(region, trial)

    def _add_updates(self) -> None:
        """Compute time of every update, in as few chunks as there may be."""
        optimizer = self.problem.optimizer
        for parameter in self.problem.updated:
            chunks = -(-parameter.elements // CHUNK_SIZES[0]) if optimizer.chunkable else 1
            spent = chunks * optimizer.latency_ns + parameter.elements * 1e9 / max(
                1, optimizer.elements_per_s
            )
            if self._deferred:
                self._late_compute.constant += spent / NS_PER_MS
            else:
                position = self._update_position(parameter.update_region)
                self._compute[position].constant += spent / NS_PER_MS
            length = min(CHUNK_SIZES[-1], parameter.elements) if optimizer.chunkable else parameter.elements
            work = length * optimizer.workspace_bytes_per_element / BYTES_PER_MB
            last = self.estimator.positions - 1
            where = last if self._deferred else self._update_position(parameter.update_region)
            self._work[where].append(Expression(constant=work))

    # positions

    def _add_positions(self, dynamic: int) -> None:
        program, est = self.program, self.estimator
        arena = _Stock(program, self._planned)
        beside = _Stock(program, self._dynamic)
        held = total_dynamic = None
        updates = set(est.updates)
        for position in range(est.positions - 1):
            change = self._hold_change.get(position)
            if held is not None or change:
                held = _follow(program, held, change or Expression())
            total_dynamic = _follow(program, total_dynamic, self._dynamic_of(position))
            self._add_time(position, arena, beside, fluid=position in updates)
            in_use = self._use.get(position, Expression())
            self._bound_arena(in_use, arena, held)
            self._bound_dynamic(dynamic, total_dynamic, beside, self._work.get(position, []))
        last = _follow(program, total_dynamic, self._dynamic_of(est.positions - 1))
        self._bound_dynamic(dynamic, last, None, self._work.get(est.positions - 1, []))
        tail = program.variable(cost=1.0)
        for stock in (arena, beside):
            stock.finish()
        written = total([*arena.written_last, *beside.written_last])
        self._traffic.carry(tail, Expression(), written, busy=False)
        program.at_least(Expression([(dynamic, 1.0)]), self.problem.initial_bytes / BYTES_PER_MB)

    def _dynamic_of(self, position: int) -> Expression:
        change = self._dynamic_change.get(position, Expression())
        base = self.estimator.base_change(position) / BYTES_PER_MB
        return Expression(list(change.terms), change.constant + base)

    def _add_time(self, position: int, arena: _Stock, beside: _Stock, *, fluid: bool) -> None:
        """Waiting, then computing; transfers go on in both.

        fluid: an update consumes what arrives while it runs, so nothing must be there before.
        """
        program = self.program
        program, stocks = self.program, (arena, beside)
        if fluid:
            for stock in stocks:
                stock.make(position)
        wait, run = program.variable(cost=1.0), program.variable(cost=1.0)
        self._transfer(wait, stocks, busy=False)
        if not fluid:
            for stock in stocks:
                stock.use(position)
        lost = self._transfer(run, stocks, busy=True)
        row = Expression([(run, 1.0)])
        row.extend(self._compute.get(position, Expression()), -1.0)
        row.extend(lost, -1.0)
        program.at_least(row)
        for stock in stocks:
            (stock.use if fluid else stock.make)(position)

    def _transfer(self, time: int, stocks: tuple[_Stock, _Stock], *, busy: bool) -> Expression:
        reads = total([stock.read() for stock in stocks])
        writes = total([stock.write() for stock in stocks])
        return self._traffic.carry(time, reads, writes, busy=busy)

    # memory

    def _bound_arena(self, in_use: Expression, stock: _Stock, held: int | None) -> None:
        row = Expression([(self.variables.arena, 1.0)])
        row.extend(in_use, -1.0)
        row.extend(self._resident, -1.0)
        row.terms += [(variable, -self._planned.density) for variable in stock.inside]
        row.terms += [] if held is None else [(held, -1.0)]
        self.program.at_least(row)

    def _bound_dynamic(
        self, dynamic: int, level: int | None, stock: _Stock | None, works: list[Expression]
    ) -> None:
        for work in works or [Expression()]:
            row = Expression([(dynamic, 1.0)])
            if level is not None:
                row.add(level, -1.0)
            inside = stock.inside if stock is not None else []
            row.terms += [(variable, -self._dynamic.density) for variable in inside]
            row.extend(work, -1.0)
            self.program.at_least(row)

    def _add_limit(self, dynamic: int) -> None:
        """Process, plan, arena and tensors stay under the limit."""
        chunks = sum(
            -(-parameter.elements // CHUNK_SIZES[0]) if self.problem.optimizer.chunkable else 1
            for parameter in self.problem.updated
        )
        # every program has at least these instructions and buffers
        records = bookkeeping_bytes(self.problem.slots // 2 + chunks, len(self.problem.parameters))
        if self.problem.host is not None:
            records = 0  # beside an accelerator they are in host memory
        allowed = self._limit_bytes - self.problem.baseline_bytes - records
        factor = 1 + self.problem.allocator_overhead_ppm / 1e6
        row = Expression([(self.variables.arena, -1.0), (dynamic, -factor)])
        self._allowed_mb = allowed / BYTES_PER_MB
        self.limit_row = self.program.at_least(row, -self._allowed_mb)

    def limit_less(self, reserve_bytes: int) -> float:
        """The limit row's bound when `reserve_bytes` are kept for what the model does not see."""
        return reserve_bytes / BYTES_PER_MB - self._allowed_mb

    # the update phase

    def _add_update_phase(self, dynamic: int) -> None:
        if not self._deferred:
            return
        wait, run = self.program.variable(cost=1.0), self.program.variable(cost=1.0)
        reads, writes = Expression(), Expression()
        lost = Expression()
        for time, busy in ((wait, False), (run, True)):
            here_in, here_out = self.program.variable(), self.program.variable()
            reads.add(here_in, 1.0)
            writes.add(here_out, 1.0)
            lost = self._traffic.carry(time, total([here_in]), total([here_out]), busy=busy)
        for moved, wanted in ((reads, self._late.demand[0]), (writes, self._late.made[0])):
            row = Expression()
            row.extend(moved)
            row.extend(wanted, -1.0)
            self.program.at_least(row)
        row = Expression([(run, 1.0)])
        row.extend(self._late_compute, -1.0)
        row.extend(lost, -1.0)
        self.program.at_least(row)
        row = Expression([(self.variables.arena, 1.0)])
        row.extend(self._resident, -1.0)
        self.program.at_least(row)


class _Stock:
    """Bytes of one kind that have been read too early or are not written yet."""

    def __init__(self, program: LinearProgram, flow: _Flow) -> None:
        self._program = program
        self._flow = flow
        self._here: int | None = None
        self._pending: int | None = None
        self._pending_before_make: int | None = None
        self._arrived: list[int] = []
        self.written_last: list[int] = []

    @property
    def inside(self) -> list[int]:
        """Variables of the bytes in memory while a position runs to its end."""
        return [variable for variable in (self._here, self._pending_before_make) if variable is not None]

    def read(self) -> int | None:
        """Bytes read in the next stretch of time; None where nothing of this kind is ever read."""
        if not self._flow.demand:
            return None
        amount = self._program.variable()
        self._here = _follow(self._program, self._here, Expression([(amount, 1.0)]), exact=True)
        return amount

    def use(self, position: int) -> None:
        """What the position needs leaves the stock."""
        needed = self._flow.demand.get(position)
        if needed is not None:
            change = Expression()
            change.extend(needed, -1.0)
            self._here = _follow(self._program, self._here, change, exact=True)

    def write(self, made_at: int | None = None) -> int | None:
        """Bytes written in the next stretch of time, of what was made before it or is made in it."""
        if made_at is not None:
            self.make(made_at)
        if self._pending is None:
            return None
        amount = self._program.variable()
        self._pending = _follow(self._program, self._pending, Expression([(amount, -1.0)]), exact=True)
        self._pending_before_make = self._pending
        return amount

    def make(self, position: int) -> None:
        made = self._flow.made.get(position)
        if made is not None:
            self._pending = _follow(self._program, self._pending, made, exact=True)

    def finish(self) -> None:
        """All that is left is written after the last position."""
        if self._pending is not None:
            self.written_last.append(self._pending)


def _follow(program: LinearProgram, before: int | None, change: Expression, *, exact: bool = False) -> int:
    """A variable for `before + change`; a level may also be taken as more, a stock not."""
    after = program.variable()
    row = Expression([(after, 1.0)])
    if before is not None:
        row.add(before, -1.0)
    row.extend(change, -1.0)
    (program.equals if exact else program.at_least)(row)
    return after


def _differences(levels: list[int]) -> list[int]:
    return [here - before for before, here in zip([0, *levels], levels, strict=False)]
