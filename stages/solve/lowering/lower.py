"""The whole program: buffers, phases, offsets."""

from __future__ import annotations

from dataclasses import dataclass

from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import Buffer, Phase, Placement
from stages.solve.homes import give_homes
from stages.solve.layout import lay_out, place
from stages.solve.lowering.buffers import BufferTable
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.lowering.evaluate import lower_evaluation
from stages.solve.lowering.slots import wait_for_slots
from stages.solve.lowering.step import StepLowering
from stages.solve.lowering.update import UpdateStream, units_of, update_reads
from stages.solve.problem import Problem


@dataclass(frozen=True)
class Program:
    """What lowering makes of a placement."""

    placement: Placement
    buffers: list[Buffer]
    phases: list[Phase]
    arena_bytes: int
    disk_bytes: int
    host_pool_bytes: int = 0
    host_bytes: int = 0


def lower(
    problem: Problem, placement: Placement, *, evaluation: Problem | None = None, layout: str = "packed"
) -> Program:
    """Lowers `placement` to a program.

    Args:
        evaluation: Of the evaluation graph, with the same parameters; None: no such phase.
        layout: How offsets are given; see `stages.solve.layout`.

    Raises:
        ArtifactError: The placement does not fit the problem.
    """
    _check(problem, placement, evaluation)
    deferred = placement.gradients != "consume"
    table = BufferTable(problem, placement, evaluation)
    between = ["step"] + (["evaluate"] if evaluation is not None else [])
    step = _new_draft("step", problem, table)
    StepLowering(problem, placement, table, step).run()
    drafts = [(step, ["update"] if deferred else between)]
    if problem.accumulates:
        drafts[0][1].append("accumulate")
        further = _with_gradients("accumulate", problem, placement, table)
        StepLowering(problem, placement, table, further, further=True).run()
        drafts.append((further, ["accumulate", "update"]))
    if deferred:
        drafts.append((_lower_update(problem, placement, table), between))
    if evaluation is not None:
        batch = [name for name, value in evaluation.values.items() if value.producer < 0]
        inputs = [table.evaluation_value(evaluation, name) for name in batch]
        phase = _new_draft("evaluate", problem, table, batch=inputs)
        lead = min(1, max(placement.prefetch, default=0))  # no plan is made around it
        lower_evaluation(evaluation, table, phase, lead)
        drafts.append((phase, between))
    phases = [draft for draft, _ in drafts]
    offsets, arena_bytes = lay_out(table.buffers, [draft.residencies for draft in phases], layout)
    buffers = place(table.buffers, offsets)
    for draft in phases:
        wait_for_slots(draft, buffers)
    homes = give_homes(problem, buffers, [draft.drafts for draft in phases], table.disk_bytes)
    finished = [draft.finish(successors) for draft, successors in drafts]
    return Program(
        placement, homes.buffers, finished, arena_bytes, homes.disk_bytes, homes.pool_bytes, homes.host_bytes
    )


def _new_draft(
    name: str, problem: Problem, table: BufferTable, *, batch: list[int] | None = None
) -> PhaseDraft:
    """A phase that begins with the training state at home, and the batch on the device."""
    if batch is None:
        batch = [table.value(value.name) for value in problem.values.values() if value.producer < 0]
    state = [buffer for buffer in table.buffers if buffer.role in ("weight", "master", "state", "persistent")]
    device = [buffer.id for buffer in state if buffer.resident]
    disk = [buffer.id for buffer in state if not buffer.resident]
    return PhaseDraft(name, device=[*device, *batch], disk=disk)


def _with_gradients(name: str, problem: Problem, placement: Placement, table: BufferTable) -> PhaseDraft:
    """A phase that finds the sum of gradients so far where "step" has left it."""
    draft = _new_draft(name, problem, table)
    gradients = [table.gradient(parameter) for parameter in problem.updated]
    if placement.gradients == "move":
        return PhaseDraft(name, draft.device, [*draft.disk, *gradients])
    return PhaseDraft(name, [*draft.device, *gradients], draft.disk)


def _lower_update(problem: Problem, placement: Placement, table: BufferTable) -> PhaseDraft:
    """Phase "update": the optimizer alone, once the norm or the overflow check is known."""
    units = [
        unit
        for parameter in problem.updated
        for unit in units_of(problem, placement, table, parameter, deferred=True)
    ]
    gradients = list(dict.fromkeys(unit.reads[0] for unit in units))
    draft = _new_draft("update", problem, table)
    if placement.gradients == "move":
        draft = PhaseDraft("update", draft.device, [*draft.disk, *gradients])
        draft.consumed.update(gradients)
    else:
        draft = PhaseDraft("update", [*draft.device, *gradients], draft.disk)
    reads = update_reads(problem, table, draft, units, placement) if placement.moving_bytes else None
    updates = UpdateStream(problem, draft, units, placement.chunk_slots - 1, reads)
    for parameter in problem.updated:
        updates.run(parameter.name)
    return draft


def _check(problem: Problem, placement: Placement, evaluation: Problem | None) -> None:
    regions = len(problem.regions)
    counts = (placement.regions, placement.prefetch, placement.prefetch_backward or placement.prefetch)
    if any(len(counted) != regions for counted in counts):
        raise ArtifactError(
            f"the placement speaks of {len(placement.regions)} regions; the graph has {regions}. Solve again"
        )
    if problem.defers_update and placement.gradients == "consume":
        raise ArtifactError(
            "gradients=consume, but updates wait until all gradients are known; expected keep or move"
        )
    for region, choice in zip(problem.regions, placement.regions, strict=True):
        if region.checkpoint and region.backward and choice.activations != "recompute":
            raise ArtifactError(
                f"region {region.name} is a checkpoint block; found activations={choice.activations}, "
                f"expected recompute"
            )
    for parameter in evaluation.parameters.values() if evaluation is not None else ():
        trained = problem.parameters.get(parameter.name)
        if parameter.uses and (trained is None or not trained.uses or trained.bytes != parameter.bytes):
            raise ArtifactError(
                f"the evaluation graph reads {parameter.name}, which the training graph does not read, "
                f"or in another size. Trace both again from one model"
            )
