"""The optimizer's part of a program: chunks that are read, updated and written back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.artifacts.plan import Placement
from stages.solve.lowering.buffers import BufferTable, Span
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.lowering.reads import QueuedRead, ReadAhead
from stages.solve.problem import PlannedParameter, Problem


@dataclass(frozen=True)
class Unit:
    """One update instruction and its transfers.

    fetch: read from disk before; reads, writes: of the update; store: written to disk and freed
    after; frees: end with the update.
    """

    parameter: PlannedParameter
    start: int
    count: int
    fetch: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    store: tuple[int, ...]
    frees: tuple[int, ...]


def units_of(
    problem: Problem, placement: Placement, table: BufferTable, parameter: PlannedParameter, *, deferred: bool
) -> list[Unit]:
    """The updates of one parameter.

    Args:
        deferred: In the update phase: a streamed weight is away then, and a moved gradient too.
            Inside backward an fp32 weight is on the device, as the region has just used it.
    """
    spans = _in_order(problem, table, parameter, table.spans(parameter))
    units = []
    for position, span in enumerate(spans):
        last = position == len(spans) - 1
        fetch, reads, writes, store, frees = _optimizer_accesses(table, parameter, span)
        if deferred and placement.gradients == "move":
            gradient = table.gradient_piece(parameter, span)
            fetch.append(gradient)
            frees.append(gradient)
        else:
            gradient = table.gradient(parameter)
            frees.extend([gradient] if last else [])
        reads.insert(0, gradient)
        if parameter.name not in table.streamed:
            weight = table.weight(parameter)
        elif parameter.has_master or deferred:
            weight = table.weight_piece(parameter, span)
            store.append(weight)
            # under bf16 and fp16 the new weight comes from the master alone
            fetch.extend([] if parameter.has_master else [weight])
        else:
            weight = table.weight(parameter)
            store.extend([weight] if last else [])
        reads.extend([] if parameter.has_master else [weight])
        writes.append(weight)
        units.append(
            Unit(
                parameter,
                span.start,
                span.count,
                tuple(fetch),
                tuple(reads),
                tuple(writes),
                tuple(store),
                tuple(frees),
            )
        )
    return units


def _in_order(
    problem: Problem, table: BufferTable, parameter: PlannedParameter, spans: list[Span]
) -> list[Span]:
    """What streams comes last, so that it has longest to arrive; but first among the last updates of the
    step, so that it leaves while the rest is updated."""
    if parameter.update_region != problem.updated[-1].update_region:
        return spans

    def stays(span: Span) -> bool:
        return not any(table.streams(parameter, piece, span) for piece in parameter.pieces)

    return sorted(spans, key=stays)


def _optimizer_accesses(
    table: BufferTable, parameter: PlannedParameter, span: Span
) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Fetch, reads, writes, store and frees of state and master of a span."""
    pieces = table.optimizer_pieces(parameter, span)
    moving = [
        buffer
        for buffer, piece in zip(pieces, parameter.pieces, strict=True)
        if table.streams(parameter, piece, span)
    ]
    return list(moving), list(pieces), list(pieces), list(moving), []


class UpdateStream:
    """Emits updates in order, the chunks of the next ones already on their way.

    Args:
        units: All updates of the phase, in order.
        ahead: Chunks that are fetched before the update in front of them has run.
        reads: Who fetches instead, in the order of use; None: this stream itself.
    """

    def __init__(
        self,
        problem: Problem,
        draft: PhaseDraft,
        units: list[Unit],
        ahead: int,
        reads: ReadAhead | None = None,
    ) -> None:
        self._problem = problem
        self._draft = draft
        self._units = units
        self._fetching = [index for index, unit in enumerate(units) if unit.fetch]
        self._next_fetch = 0
        self._next_unit = 0
        self._ahead = ahead
        self._in_flight = 0
        self._reads = reads

    def fetch_ahead(self) -> None:
        """Fetches for the next units, as many chunks as may be on the device beside the current one."""
        if self._reads is None:
            self._fetch(self._ahead - self._in_flight)

    def run(self, parameter: str) -> None:
        """Emits the updates of `parameter`, which must be next."""
        while self._next_unit < len(self._units) and self._units[self._next_unit].parameter.name == parameter:
            self._run_next()

    def _run_next(self) -> None:
        index, unit = self._next_unit, self._units[self._next_unit]
        self._fetch_for(index)
        self._next_unit += 1
        draft = self._draft.compute(
            "update",
            reads=unit.reads,
            writes=unit.writes,
            frees=unit.frees,
            region=unit.parameter.update_region,
            workspace_bytes=unit.count * self._problem.optimizer.workspace_bytes_per_element,
        )
        draft.parameter, draft.start, draft.count = unit.parameter.name, unit.start, unit.count
        for buffer in unit.store:
            self._draft.write(buffer, free=True)
        if self._reads is not None:
            self._reads.advance()

    def _fetch_for(self, index: int) -> None:
        """Fetches what unit `index` needs, and what may be fetched beside it."""
        unit = self._units[index]
        if self._reads is not None:
            slot = self._problem.update_slot(unit.parameter.update_region)
            self._reads.require((slot, 1, index))
            self._reads.advance()
            return
        while self._next_fetch < len(self._fetching) and self._fetching[self._next_fetch] <= index:
            self._fetch(1)
        self._in_flight -= bool(unit.fetch)
        self._fetch(self._ahead - self._in_flight)

    def _fetch(self, chunks: int) -> None:
        for index in self._fetching[self._next_fetch : self._next_fetch + max(0, chunks)]:
            for buffer in self._units[index].fetch:
                self._draft.read(buffer)
            self._next_fetch += 1
            self._in_flight += 1


def reads_of(problem: Problem, units: list[Unit]) -> Iterator[QueuedRead]:
    """The fetches of updates, in their order."""
    for number, unit in enumerate(units):
        order = (problem.update_slot(unit.parameter.update_region), 1, number)
        # made by the update alone: pieces of weights
        claims = tuple(buffer for buffer in unit.store if buffer not in (*unit.fetch, *unit.reads))
        if unit.fetch or claims:
            yield QueuedRead(unit.fetch, order, claims)


def update_reads(
    problem: Problem, table: BufferTable, draft: PhaseDraft, units: list[Unit], placement: Placement
) -> ReadAhead:
    """The fetches of an update phase by itself."""
    return ReadAhead(draft, table.buffers, reads_of(problem, units), placement.moving_bytes)
