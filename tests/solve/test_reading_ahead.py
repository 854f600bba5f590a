"""Slots are filled in the order of their use, activations come back among them just in time, and no update
waits for the writes of the one before it."""

from __future__ import annotations

import pytest

from stages.artifacts.plan import Instruction
from stages.solve.build import build_problem
from stages.solve.choice import Choice, everything_resident, to_placement
from stages.solve.lowering.lower import Program, lower
from stages.solve.milp.distances import with_distances
from stages.solve.milp.leads import read_leads
from stages.solve.problem import Problem
from stages.solve.task import Task, realise
from tests.solve.synthetic import MEGA, Sketch, chain

ROOMY = 10**12
CHUNK = 2**18


def problem_of(sketch: Sketch) -> Problem:
    return build_problem(sketch.graph(), sketch.costs())


def streaming(problem: Problem, moving_bytes: int) -> Choice:
    choice = everything_resident(problem)
    choice.weights = [True] * len(choice.weights)
    choice.state = [True] * len(choice.state)
    choice.chunk_elements, choice.moving_bytes = CHUNK, moving_bytes
    return choice


def lowered(problem: Problem, choice: Choice) -> Program:
    return lower(problem, to_placement(problem, choice))


def updates(program: Program, parameter: str) -> list[Instruction]:
    return [item for item in program.phases[0].instructions if item.parameter == parameter]


def test_pieces_of_weights_that_await_their_write_do_not_share_bytes() -> None:
    problem = problem_of(chain(4, precision="bf16"))
    program = lowered(problem, streaming(problem, 40 * MEGA))
    instructions = program.phases[0].instructions
    first, second, third = updates(program, "w2")[:3]
    written = {
        access.buffer
        for item in instructions
        if item.lane == "write"
        for access in item.reads
        if access.buffer in {made.buffer for made in (*first.writes, *second.writes)}
    }
    writers = {
        item.id
        for item in instructions
        if item.lane == "write" and item.reads[0].buffer in written and item.id > second.id
    }
    assert writers
    assert not writers & set(third.after)


def test_each_update_waits_for_the_write_before_it_where_there_is_room_for_one_chunk() -> None:
    problem = problem_of(chain(4, precision="bf16"))
    tight = realise(Task(problem, ROOMY), streaming(problem, 1))
    ample = realise(Task(problem, ROOMY), streaming(problem, 40 * MEGA))
    assert ample.simulation.step_ns < tight.simulation.step_ns


@pytest.mark.parametrize("kept", [8192, CHUNK])
def test_what_streams_is_updated_first_in_the_last_region_and_last_in_others(kept: int) -> None:
    problem = problem_of(chain(3))
    choice = streaming(problem, 40 * MEGA)
    choice.kept = {"w0": kept, "w1": kept}
    program = lowered(problem, choice)
    assert updates(program, "w1")[0].start == 0
    last = [item.start for item in updates(program, "w0")]
    assert last[0] == kept
    assert last[-1] < kept
    assert sorted(last) == sorted(item.start for item in updates(program, "w1"))


def test_state_that_is_kept_whole_never_moves_although_its_group_streams() -> None:
    sketch = chain(3)
    sketch.blocks[1].weights.append("v")
    sketch.weights["v"] = 100_000
    problem = problem_of(sketch)
    choice = streaming(problem, 40 * MEGA)
    choice.kept = {"v": 100_000}
    program = lowered(problem, choice)
    assert program.placement.state["v"] == "resident"
    assert program.placement.state["w1"] == "streamed"
    assert not [buffer for buffer in program.buffers if buffer.owner == "v" and buffer.role == "state"
                and not buffer.resident]  # fmt: skip
    estimate, holds = Task(problem, ROOMY).estimator, choice.copy()
    holds.kept = {}
    without = estimate.memory(holds).resident
    # two states of four bytes, less the records of their transfers
    assert estimate.memory(choice).resident > without + 0.9 * 8 * 100_000


def test_activations_come_back_just_in_time_where_compute_is_slow_and_earlier_where_the_link_is() -> None:
    slow_compute = chain(8)
    slow_link = chain(8)
    for block in slow_compute.blocks:
        block.forward_ns = 100 * MEGA
    for block in slow_link.blocks:
        block.forward_ns, block.saved_bytes = MEGA, 40 * MEGA
    leads = []
    for sketch in (slow_compute, slow_link):
        problem = problem_of(sketch)
        choice = everything_resident(problem)
        choice.activations = ["move"] * 7 + ["keep"]
        found = read_leads(Task(problem, ROOMY).estimator, choice, 1.0)
        leads.append([found[problem.backward_slot(region)] for region in range(7)])
    assert set(leads[0]) == {1}
    assert min(leads[1]) > 1
    assert leads[1][1] > leads[1][6]


def test_reads_of_activations_do_not_overtake_chunks_that_are_needed_before() -> None:
    problem = problem_of(chain(8))
    choice = streaming(problem, 10 * MEGA)
    choice.activations = ["move"] * 7 + ["keep"]
    task = Task(problem, ROOMY)
    early = choice.copy()
    early.prefetch = [0] * 8 + list(range(8))
    just = with_distances(task.estimator, choice, ROOMY)
    assert max(just.prefetch[8:]) < 7
    assert realise(task, just).simulation.step_ns <= realise(task, early).simulation.step_ns
    assert realise(task, just).simulation.peak_bytes < realise(task, early).simulation.peak_bytes
