"""The certificate: no program is faster than the relaxation, nor holds less than the model says."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.solve.milp.formulation import StepModel
from stages.solve.milp.units import NS_PER_MS
from stages.solve.problem import Problem
from stages.solve.task import Candidate, Task, budget_for, realise
from tests.solve.milp.pinned import pinned
from tests.solve.milp.strategies import choices, problems

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
ROOMY = 10**12

#: HiGHS keeps rows to 1e-7 of their units
TOLERANCE = 1e-6


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Problem, Candidate]:
    problem = draw(problems())
    layout = draw(st.sampled_from(["packed", "tight"]))
    return problem, realise(Task(problem, ROOMY, layout=layout), draw(choices(problem)))


def allowed_ns(candidate: Candidate) -> float:
    return candidate.simulation.step_ns * (1 + TOLERANCE) + 2


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(drawn=candidates())
def test_no_program_is_faster_than_the_relaxation_under_the_budget_it_needs(
    drawn: tuple[Problem, Candidate],
) -> None:
    problem, candidate = drawn
    task = Task(problem, budget_for(candidate.simulation.peak_bytes))
    relaxed = StepModel(task.estimator, candidate.simulation.peak_bytes).program.open().relax(60)
    assert relaxed.values, "the relaxation holds whatever fits"
    assert relaxed.bound * NS_PER_MS <= allowed_ns(candidate)


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(drawn=candidates())
def test_the_model_at_a_choice_needs_no_more_memory_or_time_than_its_program(
    drawn: tuple[Problem, Candidate],
) -> None:
    problem, candidate = drawn
    task = Task(problem, ROOMY)
    model = StepModel(task.estimator, candidate.simulation.peak_bytes)
    found = pinned(model, candidate.choice).relax(60)
    assert found.values, "the model claims more memory than the program holds"
    assert found.bound * NS_PER_MS <= allowed_ns(candidate)
