"""Measured against predicted times, by class of instruction."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Instruction, Plan
from stages.artifacts.timeline import Timeline
from stages.runtime.replan.correct import Class

#: a class that takes less of a step than this is not corrected: its ratio is noise, and does not matter
_LEAST_NS = 10_000


def instructions_of_step(plan: Plan) -> list[Instruction]:
    """Those of a training step, in the order of its events."""
    return [
        instruction for phase in plan.phases if phase.name != "evaluate" for instruction in phase.instructions
    ]


def ratios(
    plan: Plan, graph: RegionGraph, predicted: Timeline, steps: Sequence[Sequence[int]]
) -> dict[Class, float]:
    """Measured over predicted time of each class of instructions.

    Args:
        predicted: The simulator's timeline of `plan`, which leaves out "free".
        steps: Measured nanoseconds of each instruction of whole steps; it counts with its median.

    Raises:
        ValueError: The timelines are not those of this plan.
    """
    instructions = instructions_of_step(plan)
    shown = [position for position, item in enumerate(instructions) if item.operation != "free"]
    if len(predicted.events) != len(shown) or any(len(step) != len(instructions) for step in steps):
        raise ValueError(
            f"{len(predicted.events)} predicted and {[len(step) for step in steps]} measured durations; "
            f"expected {len(shown)} and {len(instructions)}"
        )
    measured_ns: dict[Class, float] = {}
    predicted_ns: dict[Class, float] = {}
    for position, event in zip(shown, predicted.events, strict=True):
        kind = class_of(instructions[position], graph)
        took = median(step[position] for step in steps)
        measured_ns[kind] = measured_ns.get(kind, 0) + took
        predicted_ns[kind] = predicted_ns.get(kind, 0) + event.end_ns - event.start_ns
    return {
        kind: measured_ns[kind] / predicted_ns[kind]
        for kind in measured_ns
        if predicted_ns[kind] > 0 and max(measured_ns[kind], predicted_ns[kind]) >= _LEAST_NS
    }


def class_of(instruction: Instruction, graph: RegionGraph) -> Class:
    """What of the costs says how long the instruction takes."""
    if instruction.operation in ("read", "write", "update"):
        return (instruction.operation, -1)
    name = "backward" if instruction.operation == "backward" else "forward"
    return (name, graph.regions[instruction.region].kind)


def least_step_ns(plan: Plan, step: Sequence[int]) -> int:
    """What no plan of this model saves: forward, backward and update, each once."""
    return sum(
        took
        for instruction, took in zip(instructions_of_step(plan), step, strict=True)
        if instruction.operation in ("forward", "backward", "update")
    )
