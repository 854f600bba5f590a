from __future__ import annotations

import itertools
import random

import pytest

from stages.artifacts.costs import LinkCost
from stages.artifacts.plan import Access, Buffer, Instruction, Phase, bookkeeping_bytes
from stages.solve.build import build_problem
from stages.solve.estimate import Estimator
from stages.solve.lowering.lower import Program, lower
from stages.solve.simulator import fixed_bytes, simulate
from stages.solve.task import Task, budget_for, margin_of, realise
from tests.solve.synthetic import MEGA, Sketch, chain, placement

MS = 10**6


def simulated(sketch: Sketch, **choices: object):
    problem = build_problem(sketch.graph(), sketch.costs())
    program = lower(problem, placement(sketch, **choices))  # type: ignore[arg-type]
    return program, simulate(problem, program)


def test_resident_step_takes_the_sum_of_its_parts() -> None:
    sketch = chain(3, weight=1_000_000)
    _, simulation = simulated(sketch, chunk_elements=2**22)
    updates = 3 * (1000 + MS) + 3 * (1000 + 1000)  # latency and 10^9 elements per second
    assert simulation.step_ns == 3 * 10 * MS + 3 * 20 * MS + updates


def test_recompute_costs_one_more_forward() -> None:
    sketch = chain(3)
    kept, again = simulated(sketch)[1], simulated(sketch, activations="recompute")[1]
    assert again.step_ns - kept.step_ns == 3 * 10 * MS


def test_moved_bytes_count_whole_blocks_on_each_lane() -> None:
    sketch = chain(3, weight=2**20)
    _, simulation = simulated(sketch, weights="streamed", state="streamed", chunk_elements=2**16)
    weight, small = 2**22, 4096
    assert simulation.moved_bytes["write"] == 3 * 3 * (weight + small)
    reads_of_weights = 5  # the last region keeps its own from forward to backward
    assert simulation.moved_bytes["read"] == (reads_of_weights + 6) * (weight + small)


def test_transfers_hide_behind_compute_when_fetched_ahead() -> None:
    sketch = chain(6, weight=1_000_000)
    late = simulated(sketch, weights="streamed", prefetch=0)[1]
    early = simulated(sketch, weights="streamed", prefetch=1)[1]
    assert early.step_ns < late.step_ns


def test_both_directions_at_once_are_slower() -> None:
    sketch = chain(4)
    free = [LinkCost("disk_read", 0, 10**9, 10**9), LinkCost("disk_write", 0, 10**9, 10**9)]
    shared = [LinkCost("disk_read", 0, 10**9, 10**8), LinkCost("disk_write", 0, 10**9, 10**8)]
    times = []
    for links in (free, shared):
        problem = build_problem(sketch.graph(), sketch.costs(links=links))
        choices = placement(sketch, weights="streamed", state="streamed", chunk_slots=3, prefetch=1)
        times.append(simulate(problem, lower(problem, choices)).step_ns)
    assert times[1] > times[0]


def test_timeline_has_every_instruction_once_in_lane_order() -> None:
    program, simulation = simulated(chain(4), weights="streamed", state="streamed", chunk_slots=2)
    instructions = [item for item in program.phases[0].instructions if item.operation != "free"]
    assert len(simulation.timeline.events) == len(instructions)
    for lane in ("compute", "read", "write"):
        events = [event for event in simulation.timeline.events if event.lane == lane]
        for before, after in itertools.pairwise(events):
            assert before.end_ns <= after.start_ns
    assert simulation.timeline.source == "predicted"


@pytest.mark.parametrize("activations", ["keep", "recompute", "move"])
def test_memory_over_time_never_exceeds_the_predicted_peak(activations: str) -> None:
    for prefetch in (0, 1, 2):
        _, simulation = simulated(
            chain(5, precision="bf16", tied=True),
            weights="streamed", state="streamed", activations=activations, values="move",
            prefetch=prefetch, chunk_slots=2,
        )  # fmt: skip
        assert max(held for _, held in simulation.timeline.memory) <= simulation.peak_bytes


def test_peak_of_a_resident_chain_by_hand() -> None:
    sketch = chain(2, width=1000, weight=100_000)
    sketch.blocks[0].saved_bytes = sketch.blocks[1].saved_bytes = 8000
    program, simulation = simulated(sketch)
    # before the last backward: x, v0, loss, both saved; then gradients of w1, b1, v0 and workspace
    held = 4000 + 4000 + 4 + 2 * 8000
    backward = 4000 + 4 * 101_000 + MEGA // 2
    forward = 4 * 1000 + MEGA // 2
    records = bookkeeping_bytes(len(program.phases[0].instructions), len(program.buffers))
    fixed = 10 * MEGA + program.arena_bytes + records
    assert simulation.peak_bytes == fixed + max(held - 4 + backward, forward)


def test_peak_does_not_depend_on_timing() -> None:
    sketch = chain(5, tied=True)
    peaks = set()
    for speed in (10**7, 10**9, 10**12):
        links = [LinkCost("disk_read", 0, speed, speed), LinkCost("disk_write", 0, speed, speed)]
        problem = build_problem(sketch.graph(), sketch.costs(links=links))
        choices = placement(sketch, weights="streamed", values="move", activations="move", prefetch=1)
        peaks.add(simulate(problem, lower(problem, choices)).peak_bytes)
    assert len(peaks) == 1


def test_allocator_overhead_counts_on_dynamic_bytes() -> None:
    sketch = chain(3)
    plain = build_problem(sketch.graph(), sketch.costs())
    padded = build_problem(sketch.graph(), sketch.costs(allocator_overhead_ppm=100_000))
    program = lower(plain, placement(sketch))
    dynamic = simulate(plain, program).peak_bytes - fixed_bytes(plain, program)
    difference = simulate(padded, program).peak_bytes - simulate(plain, program).peak_bytes
    assert difference == -(-dynamic // 10)


def test_estimate_is_close_to_the_simulator() -> None:
    generator = random.Random(3)
    for precision in ("fp32", "bf16", "fp16"):
        sketch = chain(7, precision=precision, tied=True)
        task = Task(build_problem(sketch.graph(), sketch.costs()), 10**12)
        for _ in range(12):
            choice = _random_choice(generator, task.estimator)
            estimate = task.estimator.estimate(choice)
            found = realise(task, choice).simulation
            needed = estimate.memory.peak_bytes + task.fixed_bytes
            assert abs(needed - found.peak_bytes) <= 0.08 * found.peak_bytes
            assert abs(estimate.step_ns - found.step_ns) <= 0.35 * found.step_ns


def _random_choice(generator: random.Random, estimator: Estimator):
    from stages.solve.choice import everything_resident

    choice = everything_resident(estimator.problem)
    choice.weights = [generator.random() < 0.5 for _ in choice.weights]
    choice.state = [generator.random() < 0.5 for _ in choice.state]
    choice.activations = [generator.choice(["keep", "recompute", "move"]) for _ in choice.activations]
    movable = [value.name for value in estimator.problem.values.values() if value.movable]
    choice.values = frozenset(name for name in movable if generator.random() < 0.5)
    choice.prefetch = [generator.randrange(3) for _ in choice.prefetch]
    choice.chunk_slots = generator.randrange(1, 4)
    choice.chunk_elements = 2**18
    return choice


def test_budget_for_is_the_least_that_leaves_the_peak() -> None:
    for peak in (0, 10**6, 791_999_999, 792_000_000, 792_000_001, 10**9, 7 * 10**11 + 3):
        budget = budget_for(peak)
        assert budget - margin_of(budget) >= peak
        assert (budget - 1) - margin_of(budget - 1) < peak


# contention, by hand

READ = Buffer(0, "weight", "w", 10**6 - 10**6 % 4096, offset=0, extent=0)
KEPT = Buffer(1, "saved", "r", 409_600, extent=10**7, dtype="uint8")


def spans_of(links: list[LinkCost], *instructions: Instruction, buffers: tuple[Buffer, ...] = (READ, KEPT)):
    """Start and end of each instruction in nanoseconds; regions compute 10 ms forward."""
    sketch = chain(2)
    problem = build_problem(sketch.graph(), sketch.costs(links=links))
    phase = Phase("step", list(instructions), [], [], [])
    program = Program(placement(sketch), list(buffers), [phase], 0, 0)
    events = simulate(problem, program).timeline.events
    return [(event.start_ns, event.end_ns) for event in events]


def link(name: str, speed: int, **costs: int) -> LinkCost:
    return LinkCost(name, 0, speed, costs.pop("contended_bytes_per_s", speed), **costs)


def forward(position: int, after: list[int] | None = None) -> Instruction:
    return Instruction(position, "compute", "forward", after or [], region=0, mode="drop")


def read(position: int, buffer: Buffer = READ) -> Instruction:
    return Instruction(position, "read", "read", writes=[Access(buffer.id, 1)])


def write(position: int, buffer: Buffer = READ) -> Instruction:
    return Instruction(position, "write", "write", reads=[Access(buffer.id, 1)])


def test_each_nanosecond_of_reading_costs_compute_its_share() -> None:
    # 999,424 bytes at 0.25 GB/s: 3.997696 ms, in which compute loses a fifth
    links = [link("disk_read", 250_000_000, compute_slowdown_ppm=200_000), link("disk_write", 10**9)]
    spans = spans_of(links, read(0), forward(1))
    assert spans[0] == (0, 3_997_696)
    assert spans[1][1] == 10 * MS + round(0.2 * 3_997_696)


def test_slowdowns_of_both_links_add_up() -> None:
    links = [
        link("disk_read", 250_000_000, compute_slowdown_ppm=200_000),
        link("disk_write", 250_000_000, compute_slowdown_ppm=300_000),
    ]
    spans = spans_of(links, read(0), write(1), forward(2))
    assert spans[2][1] == 10 * MS + round(0.5 * 3_997_696)


def test_transfers_run_at_their_busy_speed_while_compute_runs_and_faster_after_it() -> None:
    # 2.5 MB would be read in 10 ms of compute at 0.25 GB/s; the rest at 1 GB/s
    whole = Buffer(0, "weight", "w", 4_096_000, offset=0, extent=0)
    links = [link("disk_read", 10**9, busy_bytes_per_s=250_000_000), link("disk_write", 10**9)]
    spans = spans_of(links, read(0, whole), forward(1), buffers=(whole, KEPT))
    assert spans[0][1] == 10 * MS + 4_096_000 - 2_500_000
    assert spans[1][1] == 10 * MS


def test_both_links_beside_compute_run_at_the_speed_for_that() -> None:
    links = [
        link("disk_read", 10**9, contended_bytes_per_s=5 * 10**8, busy_contended_bytes_per_s=2 * 10**8),
        link("disk_write", 10**9, contended_bytes_per_s=5 * 10**8, busy_contended_bytes_per_s=2 * 10**8),
    ]
    spans = spans_of(links, read(0), write(1), forward(2))
    assert spans[0][1] == spans[1][1] == 999_424 * 5


def test_what_lies_outside_the_arena_pays_for_its_pages() -> None:
    links = [link("disk_read", 10**9, scattered_block_ns=700), link("disk_write", 10**9)]
    assert spans_of(links, read(0, KEPT))[0][1] == 409_600 + 100 * 700
    assert spans_of(links, read(0, READ))[0][1] == 999_424


def test_compute_never_stops_for_transfers() -> None:
    links = [link(name, 250_000_000, compute_slowdown_ppm=900_000) for name in ("disk_read", "disk_write")]
    spans = spans_of(links, read(0), write(1), forward(2))
    assert spans[2][1] == pytest.approx(10 * MS + 0.9 * 3_997_696, abs=2)
