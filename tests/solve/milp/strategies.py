"""Random problems with every kind of link and order, and random choices for them."""

from __future__ import annotations

from hypothesis import strategies as st

from stages.artifacts.costs import Costs, LinkCost
from stages.artifacts.slicing import HORIZONTAL, VERTICAL
from stages.solve.build import build_problem
from stages.solve.choice import CHUNK_SIZES, Choice, everything_resident, state_groups, weight_groups
from stages.solve.problem import Problem
from tests.solve.strategies import sketches
from tests.solve.synthetic import Sketch

#: borders of what stays of an optimizer state are multiples of it
STEP = 4096

SPEEDS = (3 * 10**7, 10**9, 10**10)


@st.composite
def links(draw: st.DrawFn, name: str) -> LinkCost:
    """A link that is slower beside another one, beside compute, or takes compute's time."""
    speed = draw(st.sampled_from(SPEEDS))
    contended = round(speed * draw(st.sampled_from([1.0, 0.6, 0.5])))
    busy = draw(st.sampled_from([0, 0.5, 0.9]))
    return LinkCost(
        name,
        latency_ns=draw(st.sampled_from([0, 50_000, 2_000_000])),
        bytes_per_s=speed,
        contended_bytes_per_s=contended,
        busy_bytes_per_s=round(speed * busy),
        busy_contended_bytes_per_s=round(contended * busy),
        compute_slowdown_ppm=draw(st.sampled_from([0, 0, 200_000, 700_000])),
        scattered_block_ns=draw(st.sampled_from([0, 300])),
    )


@st.composite
def costs_of(draw: st.DrawFn, sketch: Sketch, micro_batches: int) -> Costs:
    near = ["disk_read", "disk_write"]
    beside = draw(st.integers(0, 3)) == 0
    names = [*near, "upload", "download"] if beside else near
    return sketch.costs(
        device="cuda" if beside else "cpu",
        links=[draw(links(name)) for name in names],
        allocator_overhead_ppm=draw(st.sampled_from([0, 30_000])),
        micro_batches=micro_batches,
        loss="mean" if micro_batches > 1 else "",
    )


@st.composite
def problems(draw: st.DrawFn, *, most_micro_batches: int = 3) -> Problem:
    """A small problem on any device."""
    sketch = draw(sketches())
    count = draw(st.integers(1, most_micro_batches))
    order = draw(st.sampled_from([VERTICAL, HORIZONTAL])) if count > 1 else VERTICAL
    costs = draw(costs_of(sketch, count))
    host_bytes = draw(st.sampled_from([None, 300 * 10**6])) if costs.device == "cuda" else None
    return build_problem(sketch.graph(), costs, host_bytes, micro_batches=count, order=order)


@st.composite
def choices(draw: st.DrawFn, problem: Problem) -> Choice:
    """Any choice that a solver may make, transfers by distances or by capacity."""
    regions, choice = len(problem.regions), everything_resident(problem)
    usual = list(choice.activations)
    choice.weights = draw(st.lists(st.booleans(), min_size=regions, max_size=regions))
    choice.activations = [
        draw(st.sampled_from(["keep", "recompute", "move"])) if region.backward and how == "keep" else how
        for region, how in zip(problem.regions, usual, strict=True)
    ]
    groups = state_groups(problem)
    choice.state = draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups)))
    movable = sorted(value.name for value in problem.values.values() if value.movable)
    choice.values = frozenset(draw(st.sets(st.sampled_from(movable)))) if movable else frozenset()
    if problem.defers_update:
        choice.gradients = draw(st.sampled_from(["keep", "move"]))
    choice.chunk_elements = draw(st.sampled_from([CHUNK_SIZES[-1], 2**18, CHUNK_SIZES[0]]))
    choice.chunk_slots = draw(st.integers(1, 3))
    distance = st.integers(0, draw(st.integers(0, 3)))
    choice.prefetch = [draw(distance) for _ in range(problem.distances)]
    _draw_partial(draw, problem, choice)
    return choice


def _draw_partial(draw: st.DrawFn, problem: Problem, choice: Choice) -> None:
    """Weights that stay in streamed regions, state that stays in part, reading ahead by capacity."""
    held = st.sets(st.integers(0, max(0, len(weight_groups(problem)) - 1)))
    choice.held = frozenset(draw(held)) if draw(st.booleans()) else frozenset()
    for group, streamed in zip(state_groups(problem), choice.state, strict=True):
        for name in group.parameters if streamed and problem.optimizer.chunkable else ():
            most = (problem.parameters[name].elements - 1) // STEP
            kept = draw(st.integers(0, most)) if most else 0
            if kept:
                choice.kept[name] = kept * STEP
    if draw(st.booleans()):
        choice.moving_bytes = draw(st.sampled_from([1, 2_000_000, 10_000_000, 10**9]))
        choice.hold = draw(st.integers(0, 6))
