"""What every solver gets and gives, and how a choice becomes a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stages.artifacts.plan import Placement
from stages.solve.choice import Choice, to_placement
from stages.solve.estimate import Estimator
from stages.solve.lowering.lower import Program, lower
from stages.solve.problem import Problem
from stages.solve.simulator import Simulation, simulate

#: kept free whatever the budget: what the interpreter and the allocator do between our counts
LEAST_MARGIN_BYTES = 8 * 10**6


def margin_of(budget_bytes: int) -> int:
    """Bytes of a budget that no plan may use."""
    return max(LEAST_MARGIN_BYTES, -(-budget_bytes // 100))


def budget_for(peak_bytes: int) -> int:
    """The least budget under which a plan with that predicted peak is allowed."""
    budget = peak_bytes + LEAST_MARGIN_BYTES
    if margin_of(budget) > LEAST_MARGIN_BYTES:
        budget = -(-peak_bytes * 100 // 99)
        while budget - margin_of(budget) < peak_bytes:
            budget += 1
    return budget


@dataclass(frozen=True)
class Task:
    """A problem under budgets in bytes, to be solved in about `time_limit_s`.

    layout: see `stages.solve.layout`.
    """

    problem: Problem
    budget_bytes: int
    evaluation: Problem | None = None
    disk_budget_bytes: int | None = None
    layout: str = "packed"
    time_limit_s: float = 10.0

    @property
    def limit_bytes(self) -> int:
        """The largest predicted peak that is allowed."""
        return self.budget_bytes - margin_of(self.budget_bytes)

    @cached_property
    def estimator(self) -> Estimator:
        return Estimator(self.problem)

    @property
    def fixed_bytes(self) -> int:
        return self.problem.baseline_bytes


@dataclass(frozen=True)
class Candidate:
    """A choice that has been lowered and simulated."""

    choice: Choice
    placement: Placement
    program: Program
    simulation: Simulation

    def fits(self, task: Task) -> bool:
        disk, host = task.disk_budget_bytes, task.problem.host
        return (
            self.simulation.peak_bytes <= task.limit_bytes
            and (disk is None or self.program.disk_bytes <= disk)
            and (host is None or self.program.host_bytes <= host.capacity_bytes)
        )


@dataclass(frozen=True)
class Solution:
    """A solver's answer.

    least_feasible_bytes: the smallest budget that this solver plans. lower_bound_ns: no program for this
    problem and budget takes less time; 0 where the solver gives no bound.
    """

    solver: str
    candidate: Candidate
    least_feasible_bytes: int
    lower_bound_ns: int = 0

    @property
    def program(self) -> Program:
        return self.candidate.program

    @property
    def simulation(self) -> Simulation:
        return self.candidate.simulation


def realise(task: Task, choice: Choice) -> Candidate:
    """Lowers and simulates `choice`."""
    placement = to_placement(task.problem, choice)
    program = lower(task.problem, placement, evaluation=task.evaluation, layout=task.layout)
    simulation = simulate(task.problem, program, task.evaluation)
    return Candidate(choice, placement, program, simulation)
