"""From a sketch to a plan, and to a changed program."""

from __future__ import annotations

import msgspec
import pytest

from stages.artifacts.costs import Costs
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import Instruction, Phase, Placement, Plan, Prediction
from stages.config import RunConfig, SolverConfig
from stages.solve.build import build_problem
from stages.solve.lowering.lower import lower
from stages.solve.simulator import simulate
from stages.solve.stage import run
from stages.solve.verifier import verify
from tests.solve.synthetic import Sketch

ROOMY = 10**12


def config(budget_bytes: int, solver: str = "greedy_async", precision: str = "fp32") -> RunConfig:
    return RunConfig(
        budget=str(budget_bytes), precision=precision, solver=SolverConfig(solver, time_limit_s=0.3)
    )


def plan_of(sketch: Sketch, budget_bytes: int, solver: str = "greedy_async", **options: object) -> Plan:
    graph, costs = sketch.graph(), sketch.costs()
    settings = config(budget_bytes, solver, sketch.precision)
    return run(settings, graph, costs, evaluation=(graph, costs), **options)[0]  # type: ignore[arg-type]


def least_of(sketch: Sketch, solver: str) -> int:
    """The least feasible budget that the solver names."""
    with pytest.raises(InfeasibleBudgetError) as refusal:
        plan_of(sketch, 1, solver)
    least = refusal.value.least_feasible_bytes
    assert least is not None
    return least


def lowered(sketch: Sketch, placement: Placement, *, layout: str = "packed", evaluates: bool = False) -> Plan:
    """A plan made of a given placement, under a budget of exactly what it needs."""
    count, order = placement.micro_batches, placement.micro_batch_order
    costs = costs_for(sketch, count)
    problem = build_problem(sketch.graph(), costs, micro_batches=count, order=order)
    evaluation = build_problem(sketch.graph(), sketch.costs()) if evaluates else None
    program = lower(problem, placement, evaluation=evaluation, layout=layout)
    simulation = simulate(problem, program, evaluation)
    return Plan(
        solver="given",
        budget_bytes=simulation.peak_bytes,
        device="cpu",
        precision=sketch.precision,
        implementation="fused_adamw",
        placement=placement,
        buffers=program.buffers,
        phases=program.phases,
        arena_bytes=program.arena_bytes,
        disk_bytes=program.disk_bytes,
        baseline_bytes=problem.baseline_bytes,
        margin_bytes=0,
        prediction=Prediction(simulation.peak_bytes, simulation.step_ns, 0, simulation.moved_bytes),
        solve_ns=0,
        loss=costs.loss,
    )


def costs_for(sketch: Sketch, micro_batches: int) -> Costs:
    """Costs of that many micro-batches, each as large as the sketch says."""
    loss = "mean" if micro_batches > 1 else ""
    return sketch.costs(micro_batches=micro_batches, loss=loss)


def check(sketch: Sketch, plan: Plan) -> None:
    graph, costs = sketch.graph(), costs_for(sketch, plan.placement.micro_batches)
    verify(plan, graph, costs, evaluation=(graph, sketch.costs()))


def with_phase(plan: Plan, phase: Phase) -> Plan:
    phases = [phase if other.name == phase.name else other for other in plan.phases]
    return msgspec.structs.replace(plan, phases=phases)


def with_instruction(plan: Plan, phase: Phase, changed: Instruction) -> Plan:
    instructions = [changed if item.id == changed.id else item for item in phase.instructions]
    return with_phase(plan, msgspec.structs.replace(phase, instructions=instructions))


def without_instruction(plan: Plan, phase: Phase, dropped: int) -> Plan:
    """The phase with one instruction taken out and the others renumbered."""

    def moved(identity: int) -> int:
        return identity - (identity > dropped)

    instructions = [
        msgspec.structs.replace(
            item,
            id=moved(item.id),
            after=[moved(other) for other in item.after if other != dropped],
        )
        for item in phase.instructions
        if item.id != dropped
    ]
    return with_phase(plan, msgspec.structs.replace(phase, instructions=instructions))


def owners(plan: Plan, accesses: list) -> list[tuple[str, str]]:
    return [(plan.buffers[access.buffer].role, plan.buffers[access.buffer].owner) for access in accesses]
