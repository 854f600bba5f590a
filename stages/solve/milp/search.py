"""Points of the model, rounded and lowered: a bound, and the candidates near it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from stages.solve.choice import chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.formulation import BYTES_PER_MB, NS_PER_MS, StepModel
from stages.solve.milp.realisation import realise_full
from stages.solve.milp.rounding import choice_at, rounded_along
from stages.solve.pace import whole_pieces
from stages.solve.solvers.task import Candidate, Task

#: HiGHS keeps rows to 1e-7 and reports objectives of points that may be that far outside
_TOLERANCE = 1e-6
#: relative gap at which the search has nothing left to win
_GAP = 2e-3
#: chunks for which memory is kept free: on their way in, in update, on their way out
_RESERVES = (2, 3, 4, 6, 8, 12)
#: share of it that goes to slots; activations that move take the rest
_SHARES = (1.0, 0.6, 0.3, 0.0)


@dataclass(frozen=True)
class Setting:
    """What rounding does not get from the model; indices into chunk lengths, `_RESERVES`, `_SHARES`."""

    chunk: int
    reserve: int
    share: int


class ModelSearch:
    """Solves the model of one task again and again, with memory kept for what it does not see.

    Args:
        exact: Whether branch and bound may sharpen the bound.

    Attributes:
        best: The fastest candidate that fits.
        bound_ns: No program for this problem and budget takes less time.
    """

    def __init__(self, task: Task, *, exact: bool = True) -> None:
        self._task = task
        self._exact = exact
        self._model = StepModel(task.estimator, task.limit_bytes)
        self._session = self._model.program.open()
        self._chunks = chunk_sizes(task.problem)
        self._per_element = max(
            (sum(piece.itemsize for piece in whole_pieces(item)) for item in task.problem.updated), default=1
        )
        self._tried: dict[Setting, int] = {}
        self.best: Candidate | None = None
        self.bound_ns = 0

    def find_bound(self, deadline: Deadline) -> None:
        """Solves the relaxation, whatever time it takes."""
        relaxed = self._session.relax(max(60.0, deadline.left_s))
        self._raise_bound(relaxed.bound)

    def improve(self, deadline: Deadline) -> None:
        """Candidates until `deadline`, or until none of the settings nearby is better."""
        for variable in self._model.small:
            self._session.fix(variable, 0.0)
        self._climb(deadline)
        for variable in self._model.small:
            self._session.release(variable)
        if self._exact and self.gap > _GAP and deadline.left_s > 0:
            self._branch(deadline)

    def _raise_bound(self, bound_ms: float) -> None:
        self.bound_ns = max(self.bound_ns, int(bound_ms * NS_PER_MS * (1 - _TOLERANCE)))

    @property
    def gap(self) -> float:
        """How much longer than the bound the best takes, as a share of it; infinite without a best."""
        if self.best is None or not self.bound_ns:
            return float("inf")
        return self.best.simulation.step_ns / self.bound_ns - 1

    def _branch(self, deadline: Deadline) -> None:
        """Branch and bound on the whole model: a sharper bound, and a point that needs no rounding."""
        self._session.shift_row(self._model.limit_row, self._model.limit_less(0))
        outcome = self._session.solve(deadline.left_s, _GAP)
        self._raise_bound(outcome.bound)

    # candidates

    def _climb(self, deadline: Deadline) -> None:
        """From a few settings to the best of their neighbours, and on from there."""
        last = len(self._chunks) - 1
        usual = self._usual_chunk()
        starts = (Setting(usual, 3, 1), Setting(max(0, usual - 1), 2, 2), Setting(min(last, usual + 1), 4, 0))
        for start in starts:
            self._try(start, deadline)
        while deadline.left_s > 0 and self.gap > _GAP:
            best = min(self._tried, key=self._tried.__getitem__)
            fresh = [near for near in self._neighbours(best) if near not in self._tried]
            if not fresh:
                return
            for setting in fresh:
                self._try(setting, deadline)

    def _usual_chunk(self) -> int:
        """The index of the longest chunks of which a hundred fit into the step's streams."""
        moving = sum(parameter.elements for parameter in self._task.problem.updated)
        fine = [index for index, size in enumerate(self._chunks) if size <= max(2**20, moving // 100)]
        return fine[0] if fine else len(self._chunks) - 1

    def _neighbours(self, setting: Setting) -> Iterator[Setting]:
        limits = {"chunk": len(self._chunks), "reserve": len(_RESERVES), "share": len(_SHARES)}
        for name, count in limits.items():
            for step in (-1, 1):
                moved = getattr(setting, name) + step
                if 0 <= moved < count:
                    yield replace(setting, **{name: moved})

    def _try(self, setting: Setting, deadline: Deadline) -> None:
        if deadline.left_s <= 0 and self.best is not None:
            return
        reserve_bytes = _RESERVES[setting.reserve] * self._chunks[setting.chunk] * self._per_element
        values = self._point(reserve_bytes, deadline)
        self._tried[setting] = 2**63
        if values:
            self._realise(values, setting, reserve_bytes)

    def _point(self, reserve_bytes: int, deadline: Deadline) -> Sequence[float]:
        """The relaxation under that reserve, its discrete variables rounded, the rest solved again."""
        self._session.shift_row(self._model.limit_row, self._model.limit_less(reserve_bytes))
        relaxed = self._session.relax(max(5.0, deadline.left_s))
        if not relaxed.values:
            return []
        fixed = rounded_along(self._model, relaxed.values)
        for variable, value in fixed.items():
            self._session.fix(variable, value)
        rounded = self._session.relax(max(5.0, deadline.left_s))
        for variable in fixed:
            self._session.release(variable)
        for variable in self._model.small:
            self._session.fix(variable, 0.0)
        return rounded.values or relaxed.values

    def _realise(self, values: Sequence[float], setting: Setting, reserve_bytes: int) -> None:
        choice = choice_at(self._model, values, self._chunks[setting.chunk])
        arena_bytes = int(values[self._model.variables.arena] * BYTES_PER_MB)
        arena_bytes += int(_SHARES[setting.share] * reserve_bytes)
        candidate = realise_full(self._task, choice, arena_bytes)
        if candidate.fits(self._task):
            self._tried[setting] = candidate.simulation.step_ns
            self.take(candidate)

    def take(self, candidate: Candidate) -> None:
        """Remembers `candidate` if it fits and is the fastest so far."""
        if candidate.fits(self._task) and (
            self.best is None or candidate.simulation.step_ns < self.best.simulation.step_ns
        ):
            self.best = candidate
