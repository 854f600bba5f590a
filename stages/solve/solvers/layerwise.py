"""Every region but the last is offloaded: its weights and all optimizer state stream.

Activations are kept if that fits, else recomputed, else given up wherever possible; transfers start
one region ahead if that fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.solve.choice import Choice, everything_resident
from stages.solve.least_budget import most_frugal, require_budget, settle, with_frugal_chunks
from stages.solve.task import Solution, Task, realise


def solve(task: Task) -> Solution:
    """Plans `task` with the fastest of a few fixed placements that fits.

    Raises:
        InfeasibleBudgetError: None of them fits.
    """
    frugal_choice = most_frugal(task.estimator, keep_last_weights=True)
    frugal = realise(task, frugal_choice)
    require_budget(task, "layerwise", frugal)
    for choice in _ladder(task, frugal_choice):
        # the estimate errs by what packing wastes; far off, lowering is not worth its time
        if task.estimator.memory(choice).peak_bytes + task.fixed_bytes <= 1.02 * task.limit_bytes:
            candidate = realise(task, choice)
            if candidate.fits(task):
                return settle(task, "layerwise", [candidate], frugal)
    return settle(task, "layerwise", [], frugal)


def _ladder(task: Task, frugal: Choice) -> Iterator[Choice]:
    """Placements from fast to frugal."""
    problem = task.problem
    last = problem.last_backward
    for activations in ("keep", "recompute"):
        for prefetch, slots, chunk in ((1, 3, 2**20), (1, 2, 2**18), (0, 1, 0)):
            choice = frugal.copy()
            choice.activations = [
                activations if region.backward and region.index != last and not region.checkpoint else same
                for region, same in zip(
                    problem.regions, everything_resident(problem).activations, strict=True
                )
            ]
            choice.values = frozenset()
            choice.gradients = "keep" if problem.defers_update and activations == "keep" else frugal.gradients
            choice.prefetch = [prefetch] * problem.distances
            choice.chunk_slots = slots
            choice.chunk_elements = max(chunk, frugal.chunk_elements)
            yield choice if chunk else with_frugal_chunks(task.estimator, choice)
