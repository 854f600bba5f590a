"""What is on its way: bytes that have been read too early, or are not written yet."""

from __future__ import annotations

from collections import defaultdict

from stages.artifacts.costs import LinkCost
from stages.solve.milp.linear import Expression, LinearProgram, Term
from stages.solve.milp.traffic import Rates
from stages.solve.milp.units import NS_PER_MS

#: transfers under this have no latency in the model
_SMALL_MB = 0.25


class Flow:
    """What one tier of memory has in transit, position by position.

    demand: what must have been read when a position starts to compute; made: what a position produces
    and that must be written. Both in megabytes, latencies of the transfers included at the rate of a
    link whose other direction is busy, which they never exceed. Sizes are those in memory: what alignment
    adds on the link is left out. density: the least share of true bytes in any of it.
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

    def make(self, position: int, terms: list[Term], size: float, transfers: float) -> None:
        """The same for what must be written."""
        full = self._with_latency(size, transfers * self._write_latency)
        self.made[position].terms += [(variable, factor * full) for variable, factor in terms]

    def _with_latency(self, size: float, latency: float) -> float:
        if size < _SMALL_MB:  # would drown in it, and with it what is known of memory
            return size
        self.density = min(self.density, size / (size + latency))
        return size + latency


class Stock:
    """Bytes of one kind that have been read too early or are not written yet."""

    def __init__(self, program: LinearProgram, flow: Flow) -> None:
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
        self._here = follow(self._program, self._here, Expression([(amount, 1.0)]), exact=True)
        return amount

    def use(self, position: int) -> None:
        """What the position needs leaves the stock."""
        needed = self._flow.demand.get(position)
        if needed is not None:
            change = Expression()
            change.extend(needed, -1.0)
            self._here = follow(self._program, self._here, change, exact=True)

    def write(self, made_at: int | None = None) -> int | None:
        """Bytes written in the next stretch of time, of what was made before it or is made in it."""
        if made_at is not None:
            self.make(made_at)
        if self._pending is None:
            return None
        amount = self._program.variable()
        self._pending = follow(self._program, self._pending, Expression([(amount, -1.0)]), exact=True)
        self._pending_before_make = self._pending
        return amount

    def make(self, position: int) -> None:
        made = self._flow.made.get(position)
        if made is not None:
            self._pending = follow(self._program, self._pending, made, exact=True)

    def finish(self) -> None:
        """All that is left is written after the last position."""
        if self._pending is not None:
            self.written_last.append(self._pending)


def follow(program: LinearProgram, before: int | None, change: Expression, *, exact: bool = False) -> int:
    """A variable for `before + change`; a level may also be taken as more, a stock not."""
    after = program.variable()
    row = Expression([(after, 1.0)])
    if before is not None:
        row.add(before, -1.0)
    row.extend(change, -1.0)
    (program.equals if exact else program.at_least)(row)
    return after
