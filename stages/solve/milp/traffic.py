"""What links carry in a stretch of time: each direction alone, both at once, beside compute or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.artifacts.costs import LinkCost
from stages.solve.milp.linear import Expression, LinearProgram

#: together, links leave compute at least a tenth of its speed (as the simulator has it)
_MOST_SLOWDOWN = 0.9


@dataclass(frozen=True)
class Rates:
    """Megabytes per millisecond of one direction alone and while the other one runs."""

    alone: float
    contended: float

    @staticmethod
    def of(link: LinkCost, *, busy: bool) -> Rates:
        """busy: while regions compute. What was not measured is as fast as without compute."""
        alone, contended = link.bytes_per_s, link.contended_bytes_per_s
        if busy:
            alone = link.busy_bytes_per_s or alone
            contended = link.busy_contended_bytes_per_s or contended
        return Rates(max(1, alone) / 1e9, max(1, contended) / 1e9)

    @staticmethod
    def least(link: LinkCost) -> float:
        """What the link always carries."""
        busy, idle = Rates.of(link, busy=True), Rates.of(link, busy=False)
        return min(busy.alone, busy.contended, idle.alone, idle.contended)


class Traffic:
    """Rows that hold transfers to what both directions of a link carry.

    times, reads, writes: all stretches of the step, and all that is moved in them.
    """

    def __init__(self, program: LinearProgram, read: LinkCost, write: LinkCost) -> None:
        self._program = program
        self.times: list[int] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self._rates = {
            busy: (Rates.of(read, busy=busy), Rates.of(write, busy=busy)) for busy in (False, True)
        }
        read_share, write_share = read.compute_slowdown_ppm / 1e6, write.compute_slowdown_ppm / 1e6
        scale = min(1.0, _MOST_SLOWDOWN / max(read_share + write_share, 1e-9))
        self._read_share, self._write_share = read_share * scale, write_share * scale

    def carry(self, time: int, reads: Expression, writes: Expression, *, busy: bool) -> Expression:
        """Makes room in `time` for megabytes read and written.

        Returns:
            Milliseconds that compute loses to them if it runs meanwhile.
        """
        self.times.append(time)
        self.reads += [variable for variable, _ in reads.terms]
        self.writes += [variable for variable, _ in writes.terms]
        program, (read, write) = self._program, self._rates[busy]
        only_read = program.variable() if reads.terms else None
        only_write = program.variable() if writes.terms else None
        both = program.variable() if reads.terms and writes.terms else None
        used = [part for part in (only_read, only_write, both) if part is not None]
        if used:
            program.at_least(Expression([(time, 1.0), *((part, -1.0) for part in used)]))
        self._cover(reads, read, only_read, both)
        self._cover(writes, write, only_write, both)
        lost = Expression()
        for share, parts in (
            (self._read_share, (only_read, both)),
            (self._write_share, (only_write, both)),
        ):
            lost.terms += [(part, share) for part in parts if part is not None and share]
        return lost

    def _cover(self, moved: Expression, rates: Rates, alone: int | None, both: int | None) -> None:
        if alone is None:
            return
        row = Expression([(alone, rates.alone)])
        if both is not None:
            row.add(both, rates.contended)
        row.extend(moved, -1.0)
        self._program.at_least(row)


def total(variables: Sequence[int | None]) -> Expression:
    """The sum of those that are there."""
    return Expression([(variable, 1.0) for variable in variables if variable is not None])
