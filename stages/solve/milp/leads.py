"""How early activations that come back must start to arrive in time, beside all else that is read."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate

from stages.solve.choice import Choice
from stages.solve.estimate import Estimator
from stages.solve.pace import transfer_ns


def read_leads(estimator: Estimator, choice: Choice, haste: float) -> list[int]:
    """For each slot, how many slots before it the read of its activations should start.

    Earlier would take memory for longer, and keep the lane from what is needed before. Going backwards
    through all reads in the order of their use, each starts as late as those after it allow (latest start
    times of a single machine with due dates).

    Args:
        haste: Factor on the time that reads take.
    """
    problem = estimator.problem
    due = _due_times(estimator, choice)
    activations, others, chunks = _reads(estimator, choice)
    latest = due[-1]
    leads = [0] * problem.slots
    for slot in reversed(range(problem.slots)):
        latest = min(latest, due[slot + 1]) - haste * chunks.get(slot, 0.0)
        latest = min(latest, due[slot]) - haste * others.get(slot, 0.0)
        if slot in activations:
            latest -= haste * activations[slot]
            leads[slot] = slot - max(0, bisect_right(due, latest, 0, slot + 1) - 1)
    return leads


def _due_times(estimator: Estimator, choice: Choice) -> list[float]:
    """When each slot begins if compute never waits, and when the last one ends; nanoseconds."""
    problem = estimator.problem
    updates = estimator.update_costs(choice) if choice.gradients == "consume" else {}
    spent = [0.0]
    for slot, turn in enumerate(problem.turns):
        cost = problem.regions[turn.region].cost
        if turn.forward:
            spent.append(cost.forward_ns)
            continue
        again = choice.activations[turn.region] == "recompute"
        time = cost.backward_ns + (cost.forward_ns if again else 0)
        if turn.region in updates and slot == problem.update_slot(turn.region):
            time += updates[turn.region].compute_ns
        spent.append(time if problem.regions[turn.region].backward else 0.0)
    return list(accumulate(spent))


def _reads(
    estimator: Estimator, choice: Choice
) -> tuple[dict[int, float], dict[int, float], dict[int, float]]:
    """Nanoseconds of reads by the slot that needs them: activations, weights, and chunks, which are needed
    when its backward has run."""
    problem = estimator.problem
    activations: dict[int, float] = defaultdict(float)
    for batch in range(problem.micro_batches):
        for region in problem.regions:
            if region.backward and choice.activations[region.index] == "move":
                size = region.saved_extent_bytes
                slot = problem.backward_slot(region.index, batch)
                activations[slot] += transfer_ns(problem.read, size, 1, contended=True)
        for name in choice.values:
            value = problem.values[name]
            # it comes back for its last consumer, whose backward is first
            slot = problem.backward_slot(max(value.backward_consumers), batch)
            activations[slot] += transfer_ns(problem.read, value.bytes, 1, contended=True)
    weights: dict[int, float] = defaultdict(float)
    for index, group in enumerate(estimator.weights):
        if index in choice.held or not any(choice.weights[region] for region in group.regions):
            continue
        before = -(2**31)
        for slot in group.slots:
            if slot - before > choice.hold + 1:
                weights[slot] += transfer_ns(problem.read, group.bytes, len(group.parameters), contended=True)
            before = slot
    chunks = {
        problem.update_slot(region): cost.read_ns
        for region, cost in estimator.update_costs(choice).items()
        if choice.gradients == "consume"
    }
    return activations, weights, chunks
