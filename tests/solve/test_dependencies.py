"""Every dependency that lowering writes down is needed, and a missing one is noticed."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import msgspec

from stages.artifacts.plan import Phase, Plan
from stages.solve.errors import PlanError
from tests.solve.planning import check, lowered, with_phase
from tests.solve.synthetic import Sketch, chain, placement

_TRIES = 500
_CAUGHT = 0.99


def _ancestors(phase: Phase) -> list[set[int]]:
    """Of each instruction, those that must have ended before it starts."""
    found: list[set[int]] = []
    previous: dict[str, int] = {}
    for item in phase.instructions:
        direct = {*item.after, *([previous[item.lane]] if item.lane in previous else [])}
        found.append(direct.union(*(found[other] for other in direct)))
        previous[item.lane] = item.id
    return found


def _needed(phase: Phase) -> list[tuple[int, int]]:
    """(instruction, what it waits for) of the transitive reduction: waits that nothing else implies."""
    ancestors = _ancestors(phase)
    previous: dict[str, int] = {}
    needed = []
    for item in phase.instructions:
        direct = {*item.after, *([previous[item.lane]] if item.lane in previous else [])}
        needed += [
            (item.id, other)
            for other in item.after
            if not any(other in ancestors[third] for third in direct - {other})
        ]
        previous[item.lane] = item.id
    return needed


def _without(plan: Plan, phase: Phase, waiting: int, awaited: int) -> Plan:
    instructions = list(phase.instructions)
    rest = [other for other in instructions[waiting].after if other != awaited]
    instructions[waiting] = msgspec.structs.replace(instructions[waiting], after=rest)
    return with_phase(plan, msgspec.structs.replace(phase, instructions=instructions))


@cache
def _programs() -> list[tuple[Sketch, Plan]]:
    found = []
    for precision, activations, values, prefetch, slots in product(
        ("fp32", "bf16", "fp16"), ("keep", "recompute", "move"), ("keep", "move"), (0, 2), (1, 2)
    ):
        sketch = chain(6, precision=precision)
        for gradients in ("move",) if precision == "fp16" else ("consume", "move", "keep"):
            choices = placement(
                sketch,
                weights="streamed",
                state="streamed",
                activations=activations,
                values=values,
                gradients=gradients,
                prefetch=prefetch,
                chunk_slots=slots,
            )
            found.append((sketch, lowered(sketch, choices, layout="tight", evaluates=True)))
    return found


def test_a_single_missing_dependency_is_noticed() -> None:
    draws = random.Random(0)
    programs = _programs()
    missed = []
    for _ in range(_TRIES):
        sketch, plan = draws.choice(programs)
        phase = draws.choice(plan.phases)
        waiting, awaited = draws.choice(_needed(phase))
        try:
            check(sketch, _without(plan, phase, waiting, awaited))
        except PlanError:
            continue
        items = phase.instructions
        missed.append((phase.name, items[waiting].operation, items[awaited].operation))
    assert len(missed) <= (1 - _CAUGHT) * _TRIES, missed


def test_the_programs_themselves_are_sound() -> None:
    for sketch, plan in _programs()[::7]:
        check(sketch, plan)
