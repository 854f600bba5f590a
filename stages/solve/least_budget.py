"""The least budget: the most frugal placement of a solver, lowered, and the refusal below it."""

from __future__ import annotations

from collections.abc import Iterable

from stages.artifacts.errors import InfeasibleBudgetError
from stages.solve.choice import Choice, chunk_sizes, everything_resident
from stages.solve.estimate import Estimator
from stages.solve.homes import tiers_short
from stages.solve.task import Candidate, Solution, Task, budget_for


def most_frugal(estimator: Estimator, *, keep_last_weights: bool = False) -> Choice:
    """Everything that can be given up is.

    Args:
        keep_last_weights: The last region's weights stay (layerwise).
    """
    problem = estimator.problem
    choice = everything_resident(problem)
    last = problem.last_backward
    choice.weights = [
        not (keep_last_weights and region.index == len(problem.regions) - 1) for region in problem.regions
    ]
    choice.state = [True] * len(choice.state)
    choice.activations = [
        "recompute" if region.backward and (region.index != last or region.checkpoint) else "keep"
        for region in problem.regions
    ]
    choice.values = frozenset(value.name for value in problem.values.values() if value.movable)
    choice.gradients = "move" if problem.defers_update else "consume"
    choice.chunk_slots = 1
    choice = with_frugal_chunks(estimator, choice)
    return _with_moved_activations(estimator, choice)


def with_frugal_chunks(estimator: Estimator, choice: Choice) -> Choice:
    """The longest chunks among those that need least."""

    def peak(size: int) -> int:
        trial = choice.copy()
        trial.chunk_elements = size
        return estimator.memory(trial).peak_bytes

    chosen = choice.copy()
    chosen.chunk_elements = min(chunk_sizes(estimator.problem), key=peak)
    return chosen


def _with_moved_activations(estimator: Estimator, choice: Choice) -> Choice:
    """Moves instead of recomputing where the recompute itself sets the peak."""
    peak = estimator.memory(choice).peak_bytes
    for region in estimator.problem.regions:
        if choice.activations[region.index] == "recompute" and not region.checkpoint:
            trial = choice.copy()
            trial.activations[region.index] = "move"
            trial_peak = estimator.memory(trial).peak_bytes
            if trial_peak < peak:
                choice, peak = trial, trial_peak
    return choice


def least_feasible_bytes(task: Task, frugal: Candidate) -> int:
    """The smallest budget that plans: that of the frugal placement, and no stage before may burst it."""
    return max(budget_for(frugal.simulation.peak_bytes), task.problem.stage_peak_bytes)


def settle(
    task: Task,
    solver: str,
    found: Iterable[Candidate | None],
    frugal: Candidate,
    lower_bound_ns: int = 0,
) -> Solution:
    """The fastest of `found` and `frugal` that keeps every budget.

    Raises:
        InfeasibleBudgetError: None fits the disk.
    """
    candidates = [candidate for candidate in (*found, frugal) if candidate is not None]
    fitting = [candidate for candidate in candidates if candidate.fits(task)]
    if not fitting:
        needed = min(candidate.program.disk_bytes for candidate in candidates)
        if task.problem.host is not None:
            raise tiers_short(task.problem.host, needed, task.disk_budget_bytes or 0)
        raise InfeasibleBudgetError(
            f"solver {solver} needs {needed} bytes on disk under a budget of {task.budget_bytes} bytes; "
            f"tiers.disk_budget allows {task.disk_budget_bytes}. Raise either of them",
            key="tiers.disk_budget",
            found=str(task.disk_budget_bytes),
            expected=f"at least {needed} bytes",
        )
    chosen = min(fitting, key=lambda candidate: candidate.simulation.step_ns)
    return Solution(solver, chosen, least_feasible_bytes(task, frugal), lower_bound_ns)


def require_budget(task: Task, solver: str, frugal: Candidate) -> None:
    """Refuses what the solver's most frugal placement does not fit.

    Raises:
        InfeasibleBudgetError: Names the least feasible budget, what binds, and what would help.
    """
    least = least_feasible_bytes(task, frugal)
    if task.budget_bytes < least:
        stage_binds = least > budget_for(frugal.simulation.peak_bytes)
        binding = "the peak of a stage before training" if stage_binds else frugal.simulation.binding
        raise InfeasibleBudgetError(
            f"solver {solver} cannot plan a budget of {task.budget_bytes} bytes; it needs at least {least}. "
            f"What binds: {binding}. {_help(task, solver, frugal, stage_binds)}",
            key="budget",
            found=str(task.budget_bytes),
            expected=f"at least {least} bytes",
            least_feasible_bytes=least,
        )


def _help(task: Task, solver: str, frugal: Candidate, stage_binds: bool) -> str:
    if stage_binds:
        return "Raise the budget"
    ways = ["raise the budget"]
    if solver in ("resident", "layerwise"):
        ways.append("use solver=greedy_async, which gives up more")
    if task.problem.baseline_bytes > frugal.simulation.peak_bytes // 2:
        ways.append(f"{task.problem.baseline_bytes} bytes are the process without any tensor")
    ways.append("use a smaller data.batch_size or data.seq_len")
    if task.problem.precision == "fp32":
        ways.append("use precision=bf16")
    return "What would help: " + "; ".join(ways)
