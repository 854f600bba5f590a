"""On tiny problems nothing is faster than what the solvers find: every choice has been tried."""

from __future__ import annotations

import pytest

from stages.solve.choice import everything_resident
from stages.solve.least_budget import most_frugal
from stages.solve.problem import Problem
from stages.solve.solvers import SOLVERS
from stages.solve.task import Task, budget_for, realise
from tests.solve.milp.oracle import every_choice, fastest_ns, tiny_chain

#: never used up: the solvers end when nothing is left to try
AMPLE_S = 300.0


def task_at(problem: Problem, share: float) -> Task:
    """A budget between the least feasible one and what everything in memory takes."""
    roomy = Task(problem, 10**12)
    least = realise(roomy, most_frugal(roomy.estimator)).simulation.peak_bytes
    most = realise(roomy, everything_resident(problem)).simulation.peak_bytes
    return Task(problem, budget_for(least + round(share * (most - least))), time_limit_s=AMPLE_S)


def step_ns(task: Task, solver: str) -> int:
    return SOLVERS[solver](task).simulation.step_ns


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_milp_is_the_best_of_all_choices_of_two_regions(seed: int, share: float) -> None:
    task = task_at(tiny_chain(2, seed), share)
    best = fastest_ns(task, every_choice(task.problem, ("keep", "recompute", "move")))
    assert step_ns(task, "milp") == best
    assert step_ns(task, "auto") <= best


@pytest.mark.parametrize(("seed", "share"), [(1, 0.3), (2, 0.6)])
def test_milp_is_the_best_of_all_choices_of_three_regions(seed: int, share: float) -> None:
    task = task_at(tiny_chain(3, seed), share)
    assert step_ns(task, "milp") == fastest_ns(task, every_choice(task.problem, ("keep", "recompute")))


def test_partial_choices_are_never_worse_than_whole_ones() -> None:
    task = task_at(tiny_chain(2, 5, chunkable=True), 0.4)
    best = fastest_ns(task, every_choice(task.problem, ("keep", "recompute")))
    assert step_ns(task, "milp") <= best
    assert step_ns(task, "auto") <= best


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_six_regions_whose_state_and_activations_are_to_be_placed(share: float) -> None:
    task = task_at(tiny_chain(6, 0), share)
    best = fastest_ns(task, every_choice(task.problem, ("keep", "recompute"), weights_move=False))
    assert step_ns(Task(task.problem, task.budget_bytes, time_limit_s=10), "milp") <= best
