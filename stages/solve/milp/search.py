"""Points of the model, rounded and lowered: a bound, and the candidates near it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from statistics import median_high

from stages.solve.choice import Choice, chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.formulation import StepModel
from stages.solve.milp.linear import Outcome
from stages.solve.milp.realisation import realise_full
from stages.solve.milp.rounding import choice_at, rounded_along
from stages.solve.milp.settings import CHUNKS, RESERVES, SCALES, SHARES, Setting, neighbours, starts
from stages.solve.milp.units import BYTES_PER_MB, NS_PER_MS
from stages.solve.pace import whole_pieces
from stages.solve.task import Candidate, Task

#: HiGHS keeps rows to 1e-7 and reports objectives of points that may be that far outside
_TOLERANCE = 1e-6
#: relative gap at which nothing is left to win
NEAR = 2e-3
#: nearer to the relaxation than this, branch and bound is not worth its time
_WORTH_BRANCHING = 1e-3
#: elements of a chunk that hides latency well enough
_EASY_CHUNK = 2**20
#: where along the chain the rounding starts: each gives another assignment of equal bytes
_OFFSETS = (0.0, 0.3, -0.3, 0.45)
#: of the time limit, what branch and bound may take for one reserve
_BRANCHING = 0.08
#: what is left at least for changes of single choices, in the model and without it
_REFINING = 0.35
_POLISHING = 0.15
#: a change that makes the model's step so much longer is not tried
_HOPEFUL = 1.003
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
        if self.gap > NEAR and len(self._model.discrete) <= _MOST_BRANCHED:
            self._session.shift_row(self._model.limit_row, self._model.limit_less(0))
            seconds = _SHARPENING * self._task.time_limit_s
            self._raise_bound(self._session.solve(seconds, NEAR).bound)

    def improve(self, deadline: Deadline) -> None:
        """Candidates until `deadline`, or until none of the settings nearby is better."""
        for variable in self._small:
            self._session.fix(variable, 0.0)
        self._climb(deadline)
        if self._tried:
            self._refine(deadline)
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
        """Discrete choices for one of `RESERVES`; empty where nothing fits beside it."""
        if reserve not in self._assignments:
            self._keep_free(int(RESERVES[reserve] * self._beside_bytes))
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
            if deadline.left_s < 0 or objective <= relaxed.objective * (1 + NEAR):
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
        outcome = self._session.solve(_BRANCHING * self._task.time_limit_s, NEAR, start.values)
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

    def _keep_free(self, reserve_bytes: int) -> None:
        self._session.shift_row(self._model.limit_row, self._model.limit_less(reserve_bytes))

    @property
    def _beside_bytes(self) -> int:
        """What there is beside the process."""
        return self._task.limit_bytes - self._task.fixed_bytes

    def _reserve_bytes(self, setting: Setting) -> int:
        return int(RESERVES[setting.reserve] * SCALES[setting.scale] * self._beside_bytes)

    # candidates

    def _climb(self, deadline: Deadline) -> None:
        """From a few settings to the best of their neighbours, and on from there."""
        for start in starts(self._usual_reserve()):
            self._try(start, deadline)
        while deadline.left_s > _REFINING * self._task.time_limit_s and self.gap > NEAR:
            best = min(self._tried, key=self._tried.__getitem__)
            fresh = [near for near in neighbours(best) if near not in self._tried]
            if not fresh:
                return
            for setting in fresh:
                self._try(setting, deadline)

    def _refine(self, deadline: Deadline) -> None:
        """Changes single discrete choices of the best setting; the model settles all else anew."""
        setting = min(self._tried, key=self._tried.__getitem__)
        assignment = dict(self._assignments[setting.reserve])
        self._keep_free(self._reserve_bytes(setting))
        objective = self._around(assignment).objective
        changes = list(self._changes())
        untried = len(changes)
        for change in cycle(changes):
            late = deadline.left_s < _POLISHING * self._task.time_limit_s
            if not untried or late or self.gap <= NEAR:
                return
            untried -= 1
            changed = {**assignment, **change}
            if changed == assignment:
                continue
            around = self._around(changed)
            if around.objective > _HOPEFUL * objective:
                continue
            before = self.best
            self._lower(around, setting)
            if self.best is not before:
                assignment, objective, untried = changed, around.objective, len(changes)

    def _changes(self) -> Iterator[Assignment]:
        """Single choices: how a region's activations are treated, whether a value moves or a weight does."""
        variables = self._model.variables
        for region, move in variables.move.items():
            for again, moves in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
                yield {variables.recompute[region]: again, move: moves}
        for variable in (*variables.values.values(), *variables.weights):
            if variable not in self._small:
                yield {variable: 1.0}
                yield {variable: 0.0}

    def _usual_reserve(self) -> int:
        """The reserve nearest to what it is for: a chunk on its way in, one in update and one on its way out,
        and activations of three regions."""
        problem = self._task.problem
        longest = max((parameter.elements for parameter in problem.updated), default=0)
        wanted = 3 * min(longest, _EASY_CHUNK) * self._per_element
        movable = [problem.regions[region].cost.saved_bytes for region in self._model.variables.move]
        wanted += 3 * (median_high(movable) if movable else 0)
        return min(range(len(RESERVES)), key=lambda item: abs(RESERVES[item] * self._beside_bytes - wanted))

    def _chunk_elements(self, setting: Setting, choice: Choice) -> int:
        """The longest chunks of which the setting's number fits into its reserve."""
        most = self._reserve_bytes(setting) // (CHUNKS[setting.chunks] * self._per_element)
        sizes = chunk_sizes(self._task.problem, self._task.estimator.moving_elements(choice))
        return next((size for size in sizes if size <= most), sizes[-1])

    def _try(self, setting: Setting, deadline: Deadline) -> None:
        """Lowers the assignment under a setting."""
        if deadline.left_s <= 0 and self.best is not None:
            return
        self._tried[setting] = 2**63
        assignment = self._assignment(setting.reserve, deadline)
        self._keep_free(self._reserve_bytes(setting))
        if assignment:
            self._tried[setting] = self._lower(self._around(assignment), setting)

    def _lower(self, around: Outcome, setting: Setting) -> int:
        """Step time of a point's program; 2**63 where too much is kept free for what must be held."""
        if not around.values:
            return 2**63
        values = around.values
        choice = choice_at(self._model, values)
        choice.chunk_elements = self._chunk_elements(setting, choice)
        arena_bytes = int(values[self._model.variables.arena] * BYTES_PER_MB)
        arena_bytes += int(SHARES[setting.share] * self._reserve_bytes(setting))
        candidate = realise_full(self._task, choice, arena_bytes)
        self.take(candidate)
        return candidate.simulation.step_ns if candidate.fits(self._task) else 2**63
