"""How far from their use activations that move may leave and come back, as far as memory goes."""

from __future__ import annotations

from stages.solve.choice import Choice
from stages.solve.estimate import Estimator
from stages.solve.milp.leads import read_leads
from stages.solve.problem import Problem

#: reads are late sometimes: other ones hold them up
HASTE = 1.2


def with_distances(estimator: Estimator, choice: Choice, dynamic_bytes: int, haste: float = HASTE) -> Choice:
    """`choice` with distances that hide as much of the transfers of activations as fits.

    First come, first served, which is the order of the lanes: what is made first may take longest to
    leave, what is used first comes back first.

    Args:
        dynamic_bytes: For all tensors outside the arena, at any position.
        haste: How much longer reads are taken to be, so that they start earlier.
    """
    problem = estimator.problem
    leaving, returning = _moving(problem, choice)
    placed = choice.copy()
    placed.prefetch = [0] * len(choice.prefetch)
    for region in sorted(leaving):
        wanted = _lag_wanted(estimator, placed, region, leaving)
        _widen(estimator, placed, region, wanted, dynamic_bytes)
    leads = read_leads(estimator, placed, haste) if returning else []
    for region in sorted(returning, reverse=True):
        index = problem.distance_of(region, forward=False)
        slots = [problem.backward_slot(region, batch) for batch in range(problem.micro_batches)]
        _widen(estimator, placed, index, max([leads[slot] for slot in slots]), dynamic_bytes)
    return placed


def _moving(problem: Problem, choice: Choice) -> tuple[set[int], set[int]]:
    """Regions that make something that moves, and regions whose backward needs it."""
    leaving = {
        region.index
        for region in problem.regions
        if region.backward and choice.activations[region.index] == "move"
    }
    returning = set(leaving)
    for name in choice.values:
        leaving.add(problem.values[name].producer)
        returning.update(problem.values[name].backward_consumers)
    return leaving, returning


def _lag_wanted(estimator: Estimator, choice: Choice, region: int, leaving: set[int]) -> int:
    """Slots of compute that cover the writes up to this region's, if the lane never idles."""
    problem = estimator.problem
    speed = max(1, problem.write.bytes_per_s)
    clock = written = 0.0
    for index in range(region + 1):
        clock += problem.regions[index].cost.forward_ns
        if index in leaving:
            written = max(written, clock) + estimator.moved_bytes(choice, index) * 1e9 / speed
    regions = 0
    while clock < written and region + regions + 1 < estimator.count:
        regions += 1
        clock += problem.regions[region + regions].cost.forward_ns
    return problem.lead_slots(regions)


def _widen(estimator: Estimator, choice: Choice, index: int, wanted: int, dynamic_bytes: int) -> None:
    """The largest distance up to `wanted` that fits, by bisection: memory grows with distance."""
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        choice.prefetch[index] = middle
        if max(estimator.dynamic(choice)) <= dynamic_bytes:
            low = middle
        else:
            high = middle - 1
    choice.prefetch[index] = low
