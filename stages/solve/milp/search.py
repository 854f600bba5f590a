"""Points of the model, rounded and lowered: a bound, and the candidates near it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from stages.solve.choice import chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.formulation import StepModel
from stages.solve.milp.linear import Outcome
from stages.solve.milp.realisation import realise_full
from stages.solve.milp.rounding import choice_at, rounded_along
from stages.solve.milp.units import BYTES_PER_MB, NS_PER_MS
from stages.solve.pace import whole_pieces
from stages.solve.task import Candidate, Task

#: HiGHS keeps rows to 1e-7 and reports objectives of points that may be that far outside
_TOLERANCE = 1e-6
#: relative gap at which the search has nothing left to win
_GAP = 2e-3
#: nearer to the relaxation than this, branch and bound is not worth its time
_WORTH_BRANCHING = 5e-3
#: shares of the memory beside the process that are kept free for what the model takes for fluid: chunks
#: and activations on their way, which take all their memory from the first byte to the last
_RESERVES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23)
#: elements of a chunk that hides latency well enough
_EASY_CHUNK = 2**20
#: chunks in it: on their way in, in update, on their way out
_CHUNKS = (3, 6, 12, 24)
#: share of it that goes to slots; activations that move take the rest
_SHARES = (1.0, 0.6, 0.3, 0.0)
#: where along the chain the rounding starts: each gives another assignment of equal bytes
_OFFSETS = (0.0, 0.3, -0.3, 0.45)
#: of the time limit, what branch and bound may take for one reserve
_BRANCHING = 0.08
#: what is left at least for local search from the best
_POLISHING = 0.3
#: and for the bound
_SHARPENING = 0.1
#: values nearer to 0 or 1 than this are there
_INTEGRAL = 1e-5
#: above so many discrete variables, it finds nothing in that time
_MOST_BRANCHED = 160

#: no relaxation takes longer
_LONGEST_S = 60.0

#: discrete variable -> 0 or 1
Assignment = Mapping[int, float]


@dataclass(frozen=True)
class Setting:
    """What rounding does not get from the model; indices into `_RESERVES`, `_CHUNKS` and `_SHARES`."""

    reserve: int
    chunks: int
    share: int


class ModelSearch:
    """Solves the model of one task again and again, with memory kept for what it does not see.

    Attributes:
        best: The fastest candidate that fits.
        bound_ns: No program for this problem and budget takes less time.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._model = StepModel(task.estimator, task.limit_bytes)
        self._session = self._model.program.open()
        self._small = frozenset(self._model.small)
        self._chunks = chunk_sizes(task.problem)
        self._per_element = max(
            (sum(piece.itemsize for piece in whole_pieces(item)) for item in task.problem.updated), default=1
        )
        self._tried: dict[Setting, int] = {}
        self._assignments: dict[int, Assignment] = {}
        self.best: Candidate | None = None
        self.bound_ns = 0

    def find_bound(self, deadline: Deadline) -> None:
        """Solves the relaxation, whatever time it takes."""
        relaxed = self._session.relax(max(_LONGEST_S, deadline.left_s))
        self._raise_bound(relaxed.bound)

    def sharpen_bound(self) -> None:
        """Branch and bound on the whole model, where it is small enough to gain by it."""
        if self.gap > _GAP and len(self._model.discrete) <= _MOST_BRANCHED:
            self._session.shift_row(self._model.limit_row, self._model.limit_less(0))
            seconds = _SHARPENING * self._task.time_limit_s
            self._raise_bound(self._session.solve(seconds, _GAP).bound)

    def improve(self, deadline: Deadline) -> None:
        """Candidates until `deadline`, or until none of the settings nearby is better."""
        for variable in self._small:
            self._session.fix(variable, 0.0)
        self._climb(deadline)
        for variable in self._small:
            self._session.release(variable)

    @property
    def gap(self) -> float:
        """How much longer than the bound the best takes, as a share of it; infinite without a best."""
        if self.best is None or not self.bound_ns:
            return float("inf")
        return self.best.simulation.step_ns / self.bound_ns - 1

    def take(self, candidate: Candidate) -> None:
        """Remembers `candidate` if it fits and is the fastest so far."""
        if candidate.fits(self._task) and (
            self.best is None or candidate.simulation.step_ns < self.best.simulation.step_ns
        ):
            self.best = candidate

    def _raise_bound(self, bound_ms: float) -> None:
        self.bound_ns = max(self.bound_ns, int(bound_ms * NS_PER_MS * (1 - _TOLERANCE)))

    # discrete choices

    def _assignment(self, reserve: int, deadline: Deadline) -> Assignment:
        """Discrete choices for one of `_RESERVES`; empty where nothing fits beside it."""
        if reserve not in self._assignments:
            self._keep_free(reserve)
            relaxed = self._session.relax(_LONGEST_S)
            found = self._rounded(relaxed, deadline) if relaxed.values else {}
            if found and deadline.left_s > 0:
                found = self._branched(found, relaxed)
            self._assignments[reserve] = found
        return self._assignments[reserve]

    def _rounded(self, relaxed: Outcome, deadline: Deadline) -> Assignment:
        """The rounding of the relaxation that the rest of the model gets along with best."""
        best: tuple[float, Assignment] = (float("inf"), {})
        for offset in _OFFSETS:
            assignment = rounded_along(self._model, relaxed.values, offset)
            objective = self._around(assignment).objective
            if objective < best[0] or not best[1]:
                best = (objective, assignment)
            if deadline.left_s < 0 or objective <= relaxed.objective * (1 + _GAP):
                break
        return best[1]

    def _branched(self, assignment: Assignment, relaxed: Outcome) -> Assignment:
        """A better assignment by branch and bound, if there is one and it is found, over the variables
        that the relaxation leaves between 0 and 1 (Danna, Rothberg and Le Pape, 2005)."""
        start = self._around(assignment)
        settled = {
            variable: float(round(relaxed.values[variable]))
            for variable in assignment
            if abs(relaxed.values[variable] - round(relaxed.values[variable])) < _INTEGRAL
        }
        open_count = len(assignment) - len(settled)
        if start.objective <= relaxed.objective * (1 + _WORTH_BRANCHING) or open_count > _MOST_BRANCHED:
            return assignment
        for variable, value in settled.items():
            self._session.fix(variable, value)
        outcome = self._session.solve(_BRANCHING * self._task.time_limit_s, _GAP, start.values)
        for variable in settled:
            if variable not in self._small:
                self._session.release(variable)
        if outcome.objective >= start.objective:
            return assignment
        return {variable: float(round(outcome.values[variable])) for variable in assignment}

    def _around(self, assignment: Assignment) -> Outcome:
        """The model with its discrete variables as assigned."""
        for variable, value in assignment.items():
            self._session.fix(variable, value)
        solved = self._session.relax(_LONGEST_S)
        for variable in assignment:
            if variable not in self._small:
                self._session.release(variable)
        return solved

    def _keep_free(self, reserve: int) -> None:
        free = self._model.limit_less(self._reserve_bytes(reserve))
        self._session.shift_row(self._model.limit_row, free)

    def _reserve_bytes(self, reserve: int) -> int:
        return int(_RESERVES[reserve] * (self._task.limit_bytes - self._task.fixed_bytes))

    # candidates

    def _climb(self, deadline: Deadline) -> None:
        """From a few settings to the best of their neighbours, and on from there."""
        for start in _starts(self._usual_reserve()):
            self._try(start, deadline)
        while deadline.left_s > _POLISHING * self._task.time_limit_s and self.gap > _GAP:
            best = min(self._tried, key=self._tried.__getitem__)
            fresh = [near for near in _neighbours(best) if near not in self._tried]
            if not fresh:
                return
            for setting in fresh:
                self._try(setting, deadline)

    def _usual_reserve(self) -> int:
        """The reserve nearest to what it is for: a chunk on its way in, one in update and one on its way out,
        and activations of three regions."""
        problem = self._task.problem
        longest = max((parameter.elements for parameter in problem.updated), default=0)
        wanted = 3 * min(longest, _EASY_CHUNK) * self._per_element
        wanted += 3 * max(region.cost.saved_bytes for region in problem.regions)
        return min(range(len(_RESERVES)), key=lambda reserve: abs(self._reserve_bytes(reserve) - wanted))

    def _chunk_elements(self, setting: Setting) -> int:
        """The longest chunks of which the setting's number fits into its reserve."""
        most = self._reserve_bytes(setting.reserve) // (_CHUNKS[setting.chunks] * self._per_element)
        return next((size for size in self._chunks if size <= most), self._chunks[-1])

    def _try(self, setting: Setting, deadline: Deadline) -> None:
        """Lowers the assignment under a setting."""
        if deadline.left_s <= 0 and self.best is not None:
            return
        self._tried[setting] = 2**63
        assignment = self._assignment(setting.reserve, deadline)
        self._keep_free(setting.reserve)
        values = self._around(assignment).values if assignment else []
        if not values:
            return  # too much kept free for what must be held
        choice = choice_at(self._model, values, self._chunk_elements(setting))
        arena_bytes = int(values[self._model.variables.arena] * BYTES_PER_MB)
        arena_bytes += int(_SHARES[setting.share] * self._reserve_bytes(setting.reserve))
        candidate = realise_full(self._task, choice, arena_bytes)
        if candidate.fits(self._task):
            self._tried[setting] = candidate.simulation.step_ns
            self.take(candidate)


def _starts(reserve: int) -> list[Setting]:
    """Settings around a reserve, to begin with."""
    last = len(_RESERVES) - 1
    found = [
        Setting(reserve, 1, 1),
        Setting(min(last, reserve + 1), 1, 2),
        Setting(max(0, reserve - 1), 1, 1),
        Setting(min(last, reserve + 2), 2, 2),
    ]
    return list(dict.fromkeys(found))


def _neighbours(setting: Setting) -> Iterator[Setting]:
    limits = {"reserve": len(_RESERVES), "chunks": len(_CHUNKS), "share": len(_SHARES)}
    for name, count in limits.items():
        for step in (-1, 1):
            moved = getattr(setting, name) + step
            if 0 <= moved < count:
                yield replace(setting, **{name: moved})
