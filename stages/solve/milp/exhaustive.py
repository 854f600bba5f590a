"""Branch and bound over all choices of a tiny problem, where a leaf is what its program really takes.

The model bounds from below what any program with the choices made so far can take (Land and Doig, *An
automatic method of solving discrete programming problems*, Econometrica 28, 1960); the simulator says what
a complete choice takes. Rounding and local search can miss the best where a few large tensors are all that
there is to place, as none of them averages out.
"""

from __future__ import annotations

from stages.solve.choice import Choice, chunk_sizes
from stages.solve.deadline import Deadline
from stages.solve.milp.formulation import StepModel
from stages.solve.milp.linear import Outcome
from stages.solve.milp.polish import fastest
from stages.solve.milp.rounding import choice_at
from stages.solve.milp.units import NS_PER_MS
from stages.solve.task import Candidate, Task

#: with more yes-or-no choices or regions than this, they are too many to go through
MOST_CHOICES = 24
MOST_REGIONS = 6
#: of the time limit, what it may take
_SHARE = 0.1


def exhaust(task: Task, best: Candidate, deadline: Deadline) -> Candidate:
    """The fastest of `best` and all whole choices with its chunk length, twice and half of it, where what
    is small stays; of those looked at before `deadline`, or in a tenth of the time limit, where that comes
    first. Problems that are not tiny are left alone."""
    if len(task.problem.regions) > MOST_REGIONS:
        return best
    deadline = Deadline(min(deadline.left_s, _SHARE * task.time_limit_s))
    model = StepModel(task.estimator, task.limit_bytes)
    small = set(model.small)
    variables = [item for item in (*model.discrete, *model.variables.state) if item not in small]
    if len(variables) > MOST_CHOICES:
        return best
    search = _Tree(task, model, variables, best, deadline)
    for variable in small:
        search.session.fix(variable, 0.0)
    search.descend({})
    return search.best


class _Tree:
    """Depth first; of two branches the one nearer to the relaxation first, so that good leaves come early."""

    def __init__(
        self, task: Task, model: StepModel, variables: list[int], best: Candidate, deadline: Deadline
    ) -> None:
        self.best = best
        self._task = task
        self._model = model
        self.session = model.program.open()
        self._variables = variables
        self._deadline = deadline
        near = (best.choice.chunk_elements // 2, best.choice.chunk_elements, best.choice.chunk_elements * 2)
        moving = task.estimator.moving_elements(best.choice)
        self._chunks = [size for size in chunk_sizes(task.problem, moving) if size in near] or [near[1]]

    def descend(self, chosen: dict[int, float]) -> None:
        """Looks at every completion of `chosen` that may be faster than the best."""
        relaxed = self.session.relax(self._deadline.left_s)
        if self._deadline.left_s <= 0 or not self._may_win(relaxed):
            return
        open_variables = [variable for variable in self._variables if variable not in chosen]
        if not open_variables:
            self._look_at(relaxed)
            return
        variable = max(open_variables, key=lambda item: 0.5 - abs(relaxed.values[item] - 0.5))
        first = float(relaxed.values[variable] > 0.5)
        for value in (first, 1.0 - first):
            self.session.fix(variable, value)
            self.descend({**chosen, variable: value})
        self.session.release(variable)

    def _may_win(self, relaxed: Outcome) -> bool:
        return bool(relaxed.values) and relaxed.bound * NS_PER_MS < self.best.simulation.step_ns

    def _look_at(self, relaxed: Outcome) -> None:
        for chunk_elements in self._chunks:
            choice = choice_at(self._model, relaxed.values)
            choice.chunk_elements = chunk_elements
            for hold in self._holds(choice):
                if self._deadline.left_s <= 0:
                    return
                tried = choice.copy()
                tried.hold = hold
                if not self._may_win(self._held(hold, relaxed)):
                    continue
                found = fastest(self._task, tried)
                if found is not None and found.simulation.step_ns < self.best.simulation.step_ns:
                    self.best = found

    def _held(self, hold: int, leaf: Outcome) -> Outcome:
        """The model with streamed weights staying as long as `hold` says."""
        groups, variables = self._task.estimator.weights, self._model.variables
        for (index, number), variable in variables.held.items():
            slots = groups[index].slots
            stays = slots[number] - slots[number - 1] <= hold + 1
            streams = round(leaf.values[variables.weights[index]])
            self.session.fix(variable, float(streams * stays))
        relaxed = self.session.relax(self._deadline.left_s)
        for variable in variables.held.values():
            self.session.release(variable)
        return relaxed

    def _holds(self, choice: Choice) -> list[int]:
        """Every `hold` that makes some streamed weight stay between two of its uses."""
        gaps = {
            later - slot - 1
            for index, group in enumerate(self._task.estimator.weights)
            if index not in choice.held and any(choice.weights[region] for region in group.regions)
            for slot, later in zip(group.slots, group.slots[1:], strict=False)
            if later - slot > 1
        }
        return [0, *sorted(gaps)]
