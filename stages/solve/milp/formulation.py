"""Variables and rows of the step's program; `docs/planner.md` has the formulation as a whole.

A step is a row of *positions*: forward of each region, then backward and update of each in reverse.
Transfers are fluid: at every position some bytes are read and written, at most what the links carry in
the position's time. What is read before its use, and what is not written yet, takes memory. Each program
that lowering makes is a point of this model with the same or a smaller objective, so the optimum of the
relaxation is a lower bound on the time of any of them.
"""

from __future__ import annotations

from stages.artifacts.plan import bookkeeping_bytes
from stages.solve.choice import CHUNK_SIZES, SMALL_ELEMENTS
from stages.solve.estimate import Estimator
from stages.solve.milp.demands import Demands
from stages.solve.milp.far import add_far_links
from stages.solve.milp.linear import Expression, LinearProgram
from stages.solve.milp.traffic import Traffic, total
from stages.solve.milp.transit import Stock, follow
from stages.solve.milp.units import BYTES_PER_MB


class StepModel:
    """Builds the program for one estimator under one memory limit.

    Args:
        limit_bytes: The largest predicted peak that is allowed, the process included.
    """

    def __init__(self, estimator: Estimator, limit_bytes: int) -> None:
        self.estimator = estimator
        self.problem = estimator.problem
        self.program = LinearProgram()
        self._limit_bytes = limit_bytes
        self._demands = Demands(estimator, self.program)
        self.variables = self._demands.variables
        self._traffic = Traffic(self.program, self.problem.read, self.problem.write)
        self.variables.arena = self.program.variable()
        dynamic = self.program.variable()
        self._add_positions(dynamic)
        self._add_update_phase()
        self._add_limit(dynamic)
        add_far_links(self.program, estimator, self.variables, self._traffic)

    @property
    def small(self) -> list[int]:
        """Variables of weights, state and values so small that a transfer's latency, which the model does
        not see, costs more than their memory is worth."""
        weights = zip(self.estimator.weights, self.variables.weights, strict=True)
        states = zip(self.estimator.states, self.variables.state, strict=True)
        found = [variable for group, variable in weights if group.bytes < 4 * SMALL_ELEMENTS]
        found += [
            variable
            for name, variable in self.variables.values.items()
            if self.problem.values[name].bytes < 4 * SMALL_ELEMENTS
        ]
        return found + [variable for group, variable in states if group.small]

    @property
    def discrete(self) -> list[int]:
        """Variables that a choice can only take at 0 or 1."""
        variables = self.variables
        found = [*variables.weights, *variables.recompute.values(), *variables.move.values()]
        found += variables.values.values()
        return found if variables.gradients is None else [*found, variables.gradients]

    # positions

    def _add_positions(self, dynamic: int) -> None:
        program, est = self.program, self.estimator
        arena = Stock(program, self._demands.planned)
        beside = Stock(program, self._demands.dynamic)
        held = total_dynamic = None
        updates = set(est.updates)
        for position in range(est.positions - 1):
            change = self._demands.hold_change.get(position)
            if held is not None or change:
                held = follow(program, held, change or Expression())
            total_dynamic = follow(program, total_dynamic, self._dynamic_of(position))
            self._add_time(position, arena, beside, fluid=position in updates)
            in_use = self._demands.use.get(position, Expression())
            self._bound_arena(in_use, arena, held)
            self._bound_dynamic(dynamic, total_dynamic, beside, self._demands.work.get(position, []))
        last = follow(program, total_dynamic, self._dynamic_of(est.positions - 1))
        self._bound_dynamic(dynamic, last, None, self._demands.work.get(est.positions - 1, []))
        tail = program.variable(cost=1.0)
        for stock in (arena, beside):
            stock.finish()
        written = total([*arena.written_last, *beside.written_last])
        self._traffic.carry(tail, Expression(), written, busy=False)
        program.at_least(Expression([(dynamic, 1.0)]), self.problem.initial_bytes / BYTES_PER_MB)

    def _dynamic_of(self, position: int) -> Expression:
        change = self._demands.dynamic_change.get(position, Expression())
        base = self.estimator.base_change(position) / BYTES_PER_MB
        return Expression(list(change.terms), change.constant + base)

    def _add_time(self, position: int, arena: Stock, beside: Stock, *, fluid: bool) -> None:
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
        row.extend(self._demands.compute.get(position, Expression()), -1.0)
        row.extend(lost, -1.0)
        program.at_least(row)
        for stock in stocks:
            (stock.use if fluid else stock.make)(position)

    def _transfer(self, time: int, stocks: tuple[Stock, Stock], *, busy: bool) -> Expression:
        reads = total([stock.read() for stock in stocks])
        writes = total([stock.write() for stock in stocks])
        return self._traffic.carry(time, reads, writes, busy=busy)

    # memory

    def _bound_arena(self, in_use: Expression, stock: Stock, held: int | None) -> None:
        row = Expression([(self.variables.arena, 1.0)])
        row.extend(in_use, -1.0)
        row.extend(self._demands.resident, -1.0)
        row.terms += [(variable, -self._demands.planned.density) for variable in stock.inside]
        row.terms += [] if held is None else [(held, -1.0)]
        self.program.at_least(row)

    def _bound_dynamic(
        self, dynamic: int, level: int | None, stock: Stock | None, works: list[Expression]
    ) -> None:
        for work in works or [Expression()]:
            row = Expression([(dynamic, 1.0)])
            if level is not None:
                row.add(level, -1.0)
            inside = stock.inside if stock is not None else []
            row.terms += [(variable, -self._demands.dynamic.density) for variable in inside]
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

    def _add_update_phase(self) -> None:
        if not self._demands.deferred:
            return
        wait, run = self.program.variable(cost=1.0), self.program.variable(cost=1.0)
        reads, writes = Expression(), Expression()
        lost = Expression()
        for time, busy in ((wait, False), (run, True)):
            here_in, here_out = self.program.variable(), self.program.variable()
            reads.add(here_in, 1.0)
            writes.add(here_out, 1.0)
            lost = self._traffic.carry(time, total([here_in]), total([here_out]), busy=busy)
        for moved, wanted in ((reads, self._demands.late.demand[0]), (writes, self._demands.late.made[0])):
            row = Expression()
            row.extend(moved)
            row.extend(wanted, -1.0)
            self.program.at_least(row)
        row = Expression([(run, 1.0)])
        row.extend(self._demands.late_compute, -1.0)
        row.extend(lost, -1.0)
        self.program.at_least(row)
        row = Expression([(self.variables.arena, 1.0)])
        row.extend(self._demands.resident, -1.0)
        self.program.at_least(row)
