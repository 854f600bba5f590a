"""The buffers of a program, and their homes on disk."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import ALIGNMENT, Buffer, Placement
from stages.solve.problem import Piece, PlannedParameter, Problem, align

#: offset of a planned buffer until the layout gives it one
UNPLACED = 0


@dataclass(frozen=True)
class Span:
    """Elements [start, start+count) of a parameter, updated at once."""

    start: int
    count: int


def _check_chunks(placement: Placement) -> None:
    """Raises: ArtifactError: A chunk length would put pieces off the disk's alignment."""
    for name in ("chunk_elements", "resident_chunk_elements"):
        chunk, least = getattr(placement, name), int(name == "chunk_elements")
        if chunk < least or chunk % ALIGNMENT:
            raise ArtifactError(f"{name} is {chunk}; expected a positive multiple of {ALIGNMENT}")


def _cut(start: int, end: int, chunk: int) -> list[Span]:
    return [Span(here, min(chunk, end - here)) for here in range(start, end, chunk)]


def _kept_elements(placement: Placement, parameter: PlannedParameter) -> int:
    """Leading elements whose state stays on the device while the rest streams.

    Raises:
        ArtifactError: The border is off the disk's alignment or outside the parameter.
    """
    kept = placement.resident_elements.get(parameter.name, 0)
    if kept % ALIGNMENT or not 0 <= kept < max(1, parameter.elements):
        raise ArtifactError(
            f"{kept} elements of {parameter.name} keep their state; expected a multiple of {ALIGNMENT} "
            f"under its {parameter.elements} elements"
        )
    return kept


class BufferTable:
    """Gives buffers ids and extents. What depends on lowering's choices is made on first request."""

    def __init__(self, problem: Problem, placement: Placement, evaluation: Problem | None = None) -> None:
        _check_chunks(placement)
        self._problem = problem
        self._placement = placement
        self.buffers: list[Buffer] = []
        self.disk_bytes = 0
        held = frozenset(placement.resident_weights)
        self.streamed = frozenset(
            name
            for name, parameter in problem.parameters.items()
            # what no region reads has no business on the device
            if not parameter.uses
            or (
                name not in held
                and any(placement.regions[region].weights == "streamed" for region in parameter.uses)
            )
        )
        self._extents: dict[tuple[str, str, str], int] = {}
        self._ids: dict[tuple[str, str, str, int], int] = {}
        for parameter in problem.parameters.values():
            self.weight(parameter)
        self._add_pieces()
        self._add_weight_pieces()
        self._persistent = dict(problem.persistent)
        if evaluation is not None:
            self._persistent.update(evaluation.persistent)
        for name in self._persistent:
            self.persistent(name)

    # parameters

    def spans(self, parameter: PlannedParameter) -> list[Span]:
        """How the update cuts a parameter: in long pieces what is on the device anyhow."""
        if not self._problem.optimizer.chunkable:
            return [Span(0, parameter.elements)]
        short = self._placement.chunk_elements
        long = short
        if not self._weight_or_gradient_moves(parameter):
            long = self._placement.resident_chunk_elements or short
        kept = _kept_elements(self._placement, parameter)
        if self._placement.state.get(parameter.name, "resident") != "streamed":
            kept = parameter.elements
        return [*_cut(0, kept, long), *_cut(kept, parameter.elements, short)]

    def _weight_or_gradient_moves(self, parameter: PlannedParameter) -> bool:
        """Whether every update of the parameter has a piece of its weight or gradient that moves."""
        return self._placement.gradients == "move" or self._writes_pieces(parameter)

    def _writes_pieces(self, parameter: PlannedParameter) -> bool:
        """Whether the update writes its weight piece by piece: a streamed one that its master replaces,
        or that is away."""
        deferred = self._placement.gradients != "consume"
        return parameter.name in self.streamed and (parameter.has_master or deferred)

    def weight(self, parameter: PlannedParameter) -> int:
        streamed = parameter.name in self.streamed
        return self._add(
            "weight",
            parameter.name,
            parameter.bytes,
            parameter.dtype,
            planned=bool(parameter.uses),
            extent=self._extent("weight", parameter.name, parameter.bytes) if streamed else None,
            resident=not streamed,
            count=parameter.elements,
        )

    def weight_piece(self, parameter: PlannedParameter, span: Span) -> int:
        """Elements of a streamed weight; the weight itself where the span is all of it."""
        if span.count == parameter.elements:
            return self.weight(parameter)
        return self._piece(parameter, "weight", span)

    def gradient_piece(self, parameter: PlannedParameter, span: Span) -> int:
        """Elements of a gradient that comes back from disk into a slot."""
        return self._piece(parameter, "gradient", span)

    def _piece(self, parameter: PlannedParameter, role: str, span: Span) -> int:
        return self._add(
            role,
            parameter.name,
            span.count * parameter.itemsize,
            parameter.dtype,
            planned=True,
            extent=self._extents[(role, parameter.name, "")] + span.start * parameter.itemsize,
            start=span.start,
            count=span.count,
            key=f"{role} piece",
        )

    def optimizer_pieces(self, parameter: PlannedParameter, span: Span) -> list[int]:
        """Optimizer state and master of the span; whole tensors where they are resident."""
        return [self._optimizer_piece(parameter, piece, span) for piece in parameter.pieces]

    def _optimizer_piece(self, parameter: PlannedParameter, piece: Piece, span: Span) -> int:
        if piece.elements != parameter.elements or not self._is_cut(parameter, piece):
            span = Span(0, piece.elements)
        return self._ids[(piece.role, parameter.name, piece.state, span.start)]

    def streams(self, parameter: PlannedParameter, piece: Piece, span: Span) -> bool:
        """Whether the piece's elements in the span wait on disk. A state that does not grow with its
        parameter (a count) stays, unless updates take whole parameters."""
        if self._placement.state.get(parameter.name, "resident") != "streamed":
            return False
        if piece.elements != parameter.elements:
            return not self._problem.optimizer.chunkable
        return span.start >= _kept_elements(self._placement, parameter)

    def _is_cut(self, parameter: PlannedParameter, piece: Piece) -> bool:
        """Whether the piece has a buffer for each span: it streams, if only in part."""
        return self.streams(parameter, piece, Span(piece.elements, 0))

    def _add_pieces(self) -> None:
        for parameter in self._problem.updated:
            for piece in parameter.pieces:
                spans = [Span(0, piece.elements)]
                if self._is_cut(parameter, piece):
                    self._extent(piece.role, parameter.name, piece.bytes, piece.state)
                    if piece.elements == parameter.elements:
                        spans = self.spans(parameter)
                for span in spans:
                    streams = self.streams(parameter, piece, span)
                    home = self._extents.get((piece.role, parameter.name, piece.state), 0)
                    self._add(
                        piece.role,
                        parameter.name,
                        span.count * piece.itemsize,
                        piece.dtype,
                        planned=True,
                        extent=home + span.start * piece.itemsize if streams else None,
                        resident=not streams,
                        state=piece.state,
                        start=span.start,
                        count=span.count,
                    )

    def _add_weight_pieces(self) -> None:
        for parameter in self._problem.updated:
            if self._writes_pieces(parameter):
                for span in self.spans(parameter):
                    self.weight_piece(parameter, span)

    def partial_gradient(
        self, parameter: PlannedParameter, micro_batch: int, *, further: bool = False
    ) -> int:
        """What regions have sent so far with one micro-batch, where several send to the parameter.

        A plain loop completes one micro-batch's gradient before it adds it to the sum; that order
        of additions is kept. The first micro-batch's is the sum itself, but for a further batch's.
        """
        if len(parameter.gradient_regions) == 1 or not (micro_batch or further):
            return self.gradient(parameter)
        if not micro_batch:
            return self._add("partial_gradient", parameter.name, parameter.bytes, parameter.dtype)
        return self._add(
            "gradient", parameter.name, parameter.bytes, parameter.dtype, micro_batch=micro_batch
        )

    def gradient(self, parameter: PlannedParameter) -> int:
        moves = self._placement.gradients == "move"
        extent = self._extent("gradient", parameter.name, parameter.bytes) if moves else None
        return self._add("gradient", parameter.name, parameter.bytes, parameter.dtype, extent=extent)

    def persistent(self, name: str) -> int:
        buffer = self._persistent[name]
        return self._add("persistent", name, buffer.bytes, buffer.dtype, resident=True)

    # activations

    def value(self, name: str, micro_batch: int = 0) -> int:
        value = self._problem.values[name]
        if value.producer < 0:
            return self._add("value", name, self._input_bytes(name), value.dtype, resident=True)
        moves = self._placement.values.get(name, "keep") == "move" and value.movable
        extent = self._extent("value", name, value.bytes, micro_batch=micro_batch) if moves else None
        return self._add("value", name, value.bytes, value.dtype, extent=extent, micro_batch=micro_batch)

    def _input_bytes(self, name: str) -> int:
        """The whole batch is there at once; its slices are views."""
        return self._problem.values[name].bytes * self._problem.micro_batches

    def value_gradient(self, name: str, micro_batch: int = 0) -> int:
        value = self._problem.values[name]
        return self._add("value_gradient", name, value.bytes, value.dtype, micro_batch=micro_batch)

    def saved(self, region: int, micro_batch: int = 0) -> int:
        planned = self._problem.regions[region]
        moves = self._placement.regions[region].activations == "move" and planned.cost.saved_bytes > 0
        size, extent = planned.saved_extent_bytes, None
        if moves:
            extent = self._extent("saved", planned.name, size, micro_batch=micro_batch)
        return self._add(
            "saved", planned.name, planned.cost.saved_bytes, "uint8", extent=extent, micro_batch=micro_batch
        )

    def evaluation_value(self, problem: Problem, name: str) -> int:
        """A value of the evaluation graph; its batch takes the place of the training batch."""
        value = problem.values[name]
        key = "value" if value.producer < 0 and self._same_input(name, value.bytes) else "evaluation value"
        return self._add("value", name, value.bytes, value.dtype, resident=value.producer < 0, key=key)

    def _same_input(self, name: str, size_bytes: int) -> bool:
        known = self._problem.values.get(name)
        return known is not None and known.producer < 0 and self._input_bytes(name) == size_bytes

    # records

    def _extent(self, role: str, owner: str, size_bytes: int, state: str = "", micro_batch: int = 0) -> int:
        key = (role, owner, f"{state}{micro_batch or ''}")
        if key not in self._extents:
            self._extents[key] = self.disk_bytes
            self.disk_bytes += align(max(1, size_bytes))
        return self._extents[key]

    def _add(
        self,
        role: str,
        owner: str,
        size_bytes: int,
        dtype: str,
        *,
        planned: bool = False,
        extent: int | None = None,
        resident: bool = False,
        state: str = "",
        start: int = 0,
        count: int = 0,
        micro_batch: int = 0,
        key: str = "",
    ) -> int:
        known = (key or role, owner, f"{state}{micro_batch or ''}", start)
        if known not in self._ids:
            self._ids[known] = len(self.buffers)
            self.buffers.append(
                Buffer(
                    id=len(self.buffers),
                    role=role,
                    owner=owner,
                    bytes=size_bytes,
                    start=start,
                    count=count,
                    state=state,
                    dtype=dtype,
                    offset=UNPLACED if planned else None,
                    extent=extent,
                    resident=resident,
                    micro_batch=micro_batch,
                )
            )
        return self._ids[known]
