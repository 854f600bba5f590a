"""Every choice of a tiny problem, lowered and simulated: what no solver can beat."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from stages.solve.build import build_problem
from stages.solve.choice import Choice, chunk_sizes, everything_resident, state_groups
from stages.solve.milp.polish import fastest
from stages.solve.problem import Problem
from stages.solve.task import Task
from tests.solve.synthetic import MEGA, Block, Sketch


def tiny_chain(count: int, seed: int, *, chunkable: bool = False) -> Problem:
    """A chain of unequal regions with one weight each and almost nothing between them, so that there is
    little else to choose than weights, their state and activations.

    Args:
        chunkable: Whether state may stay in part. Weights are then short enough for two lengths of chunks.
    """
    draw = random.Random(seed)
    most = 130_000 if chunkable else 4 * MEGA
    values = {"x": 250, **{f"v{index}": 250 for index in range(count - 1)}, "loss": 1}
    weights = {f"w{index}": draw.randrange(most // 4, most) for index in range(count)}
    names = [*values]
    blocks = [
        Block(
            [names[index]],
            [names[index + 1]],
            [f"w{index}"],
            saved_bytes=draw.randrange(most // 4, 5 * most),
            forward_ns=draw.randrange(most // 4, 5 * most),
        )
        for index in range(count)
    ]
    sketch = Sketch(blocks, values, weights, chunkable=chunkable)
    return build_problem(sketch.graph(), sketch.costs())


def every_choice(problem: Problem, ways: tuple[str, ...], *, weights_move: bool = True) -> Iterator[Choice]:
    """Weights, state and activations of each region, and how long streamed weights wait for their next use.

    Args:
        ways: Of treating activations.
        weights_move: Else they all stay.
    """
    count = len(problem.regions)
    given_up = [index for index in range(count) if index != problem.last_backward]
    chunk = chunk_sizes(problem)[-1]
    for weights in product((False, True) if weights_move else (False,), repeat=count):
        for state in product((False, True), repeat=count):
            for activations in product(ways, repeat=len(given_up)):
                # uses that lie `hold` + 1 slots apart or less stay together
                for hold in range(0, 2 * count - 1, 2) if any(weights) else (0,):
                    choice = everything_resident(problem)
                    choice.weights, choice.state = list(weights), list(state)
                    choice.hold, choice.chunk_elements = hold, chunk
                    for index, how in zip(given_up, activations, strict=True):
                        choice.activations[index] = how
                    yield choice


def fastest_ns(task: Task, choices: Iterator[Choice]) -> int:
    """Step time of the fastest that fits. Those that cannot be faster are not lowered."""
    best = 2**63
    for least, choice in sorted(
        ((_least_ns(task.problem, choice), choice) for choice in choices), key=_first
    ):
        if least < best:
            found = fastest(task, choice)
            best = best if found is None else min(best, found.simulation.step_ns)
    return best


def _first(pair: tuple[float, Choice]) -> float:
    return pair[0]


def _least_ns(problem: Problem, choice: Choice) -> float:
    """No program of `choice` takes less: what compute takes, or what must be written of optimizer states."""
    compute = sum(region.cost.forward_ns + region.cost.backward_ns for region in problem.regions)
    for region, how in zip(problem.regions, choice.activations, strict=True):
        compute += region.cost.forward_ns if how == "recompute" else 0
    groups = zip(state_groups(problem), choice.state, strict=True)
    written = sum(group.bytes for group, streamed in groups if streamed)
    return max(compute, written * 1e9 / problem.write.bytes_per_s)
