"""Which backward makes which gradient complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stages.artifacts.plan import Buffer, Phase


@dataclass(frozen=True)
class Completes:
    """Parameters whose gradient a backward makes complete: for its micro-batch, for the step."""

    of_micro_batch: tuple[str, ...] = ()
    of_step: tuple[str, ...] = ()


COMPLETES_NOTHING = Completes()


def gradients_completed_by(phase: Phase, owners: Mapping[int, Buffer]) -> dict[int, Completes]:
    """What each backward, by instruction id, makes complete: it is the last to write it."""
    of_micro_batch: dict[tuple[str, int], int] = {}
    of_step: dict[str, int] = {}
    for instruction in phase.instructions:
        if instruction.operation != "backward":
            continue
        for access in instruction.writes:
            buffer = owners[access.buffer]
            if buffer.role == "gradient":
                of_micro_batch[buffer.owner, instruction.micro_batch] = instruction.id
                of_step[buffer.owner] = instruction.id
    completed: dict[int, Completes] = {}
    for (name, _), identity in of_micro_batch.items():
        known = completed.get(identity, COMPLETES_NOTHING)
        whole = (name,) if of_step[name] == identity else ()
        completed[identity] = Completes((*known.of_micro_batch, name), (*known.of_step, *whole))
    return completed
