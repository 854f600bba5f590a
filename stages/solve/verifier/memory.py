"""No two live buffers overlap, and every tier stays in its budget, whatever the timing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stages.artifacts.costs import Costs
from stages.artifacts.plan import ALIGNMENT, Phase, Plan, bookkeeping_bytes
from stages.solve.errors import PlanError
from stages.solve.verifier.order import Order


@dataclass(frozen=True)
class _Stay:
    """A buffer on the device. made: -1 at entry; freed: None at exit."""

    buffer: int
    made: int
    freed: int | None


def _stays(phase: Phase) -> Iterator[_Stay]:
    since = {location.buffer: -1 for location in phase.entry if location.tier == "device"}
    for instruction in phase.instructions:
        for access in instruction.writes:
            if access.buffer not in since:
                since[access.buffer] = instruction.id
        for buffer in instruction.frees:
            yield _Stay(buffer, since.pop(buffer), instruction.id)
    for buffer, made in since.items():
        yield _Stay(buffer, made, None)


def check_slots(plan: Plan, phase: Phase, order: Order) -> None:
    """Checks planned buffers in pairs: of two that share bytes, one has certainly left first.

    Raises:
        PlanError: Names the later buffer's maker.
    """
    stays = [stay for stay in _stays(phase) if plan.buffers[stay.buffer].offset is not None]
    spans = {stay.buffer: _span(plan, stay.buffer) for stay in stays}
    borders = sorted({border for span in spans.values() for border in span})
    index = {border: position for position, border in enumerate(borders)}
    occupant: list[_Stay | None] = [None] * len(borders)
    for stay in sorted(stays, key=lambda item: item.made):
        start, end = spans[stay.buffer]
        for part in range(index[start], index[end]):
            previous = occupant[part]
            if previous is not None and not _has_left(order, previous, stay):
                _report_overlap(plan, phase, order, previous, stay)
            occupant[part] = stay


def _span(plan: Plan, buffer: int) -> tuple[int, int]:
    record = plan.buffers[buffer]
    assert record.offset is not None
    end = record.offset + max(1, -(-record.bytes // ALIGNMENT)) * ALIGNMENT
    if record.offset < 0 or record.offset % ALIGNMENT or end > plan.arena_bytes:
        raise PlanError(
            f"buffer {buffer} ({record.role} of {record.owner}) lies at {record.offset} to {end} in the "
            f"arena; expected a multiple of {ALIGNMENT} within {plan.arena_bytes} bytes"
        )
    return record.offset, end


def _has_left(order: Order, previous: _Stay, stay: _Stay) -> bool:
    return previous.freed is not None and stay.made >= 0 and order.before(previous.freed, stay.made)


def _report_overlap(plan: Plan, phase: Phase, order: Order, previous: _Stay, stay: _Stay) -> None:
    where = order.name(stay.made) if stay.made >= 0 else f"phase {phase.name}, entry"
    old, new = plan.buffers[previous.buffer], plan.buffers[stay.buffer]
    raise PlanError(
        f"{where}: buffer {new.id} ({new.role} of {new.owner}) may take memory that buffer {old.id} "
        f"({old.role} of {old.owner}) still holds"
    )


def check_pace(plan: Plan, phase: Phase, order: Order) -> None:
    """Checks that what takes memory outside the arena is read only once the compute instruction in front
    has ended: prefetch means no more, and memory at a moment is planned by it.

    Raises:
        PlanError: Names the read.
    """
    last_compute = -1
    for instruction in phase.instructions:
        if instruction.lane == "compute":
            last_compute = instruction.id
        if instruction.operation != "read" or last_compute < 0:
            continue
        grows = [access.buffer for access in instruction.writes if plan.buffers[access.buffer].offset is None]
        if grows and not order.before(last_compute, instruction.id):
            raise PlanError(
                f"{order.name(instruction.id)}: buffer {grows[0]} takes memory outside the arena and may "
                f"come before {order.name(last_compute)} has ended"
            )


def check_budgets(plan: Plan, orders: list[Order], costs: Costs, disk_budget_bytes: int | None) -> None:
    """Checks the device's and the disk's budget.

    Raises:
        PlanError: Names the phase and instruction at the peak, found and allowed bytes.
    """
    allowed = plan.budget_bytes - plan.margin_bytes
    if plan.baseline_bytes != costs.baseline_bytes or plan.margin_bytes < 0:
        raise PlanError("the plan's baseline or margin is not that of its costs")
    if max(costs.stage_peak_bytes.values(), default=0) > plan.budget_bytes:
        raise PlanError("a stage before training needs more than the budget")
    # beside an accelerator the process that keeps the records is in host memory
    records = (
        0
        if plan.device != "cpu"
        else bookkeeping_bytes(sum(len(phase.instructions) for phase in plan.phases), len(plan.buffers))
    )
    for order in orders:
        dynamic, instruction = _worst_moment(plan, order)
        overhead = -(-dynamic * costs.allocator_overhead_ppm // 10**6)
        peak = plan.baseline_bytes + records + plan.arena_bytes + dynamic + overhead
        if peak > min(allowed, plan.prediction.peak_bytes):
            raise PlanError(
                f"{order.name(instruction)}: {peak} bytes may be held; the budget less the margin is "
                f"{allowed} bytes, the predicted peak {plan.prediction.peak_bytes} bytes"
            )
    if disk_budget_bytes is not None and plan.disk_bytes > disk_budget_bytes:
        raise PlanError(f"{plan.disk_bytes} bytes on disk; tiers.disk_budget allows {disk_budget_bytes}")


def _worst_moment(plan: Plan, order: Order) -> tuple[int, int]:
    """Most dynamic bytes and workspace, and the compute instruction there.

    Between two compute instructions, and during each, a buffer counts if some timing has it there.
    """
    instructions = order.phase.instructions
    compute = [item.id for item in instructions if item.lane == "compute"]
    during, between = [0] * (len(compute) + 1), [0] * (len(compute) + 2)
    for stay in _stays(order.phase):
        size = plan.buffers[stay.buffer].bytes
        if plan.buffers[stay.buffer].offset is not None or not size:
            continue
        # finished before the buffer can exist / not startable before it has gone
        gone = 0 if stay.made < 0 else order.known[stay.made][0]
        last = len(compute) if stay.freed is None else _first_after(order, compute, stay.freed)
        ended_by_compute = stay.freed is not None and instructions[stay.freed].lane == "compute"
        made_by_compute = stay.made >= 0 and instructions[stay.made].lane == "compute"
        during[gone] += size
        during[last] -= size
        # gap g lies before the compute instruction of rank g
        between[gone + 1 if made_by_compute else gone] += size
        between[last if ended_by_compute else last + 1] -= size
    worst, where, here, gap = 0, compute[0] if compute else 0, 0, 0
    for rank, identity in enumerate([*compute, compute[-1] if compute else 0]):
        gap += between[rank]
        here += during[rank] if rank < len(compute) else 0
        work = instructions[identity].workspace_bytes if rank < len(compute) else 0
        total = max(gap, here + work if rank < len(compute) else 0)
        if total > worst:
            worst, where = total, identity
    return worst, where


def _first_after(order: Order, compute: list[int], freer: int) -> int:
    """Rank of the first compute instruction that starts only after `freer` has finished."""
    low, high = 0, len(compute)
    while low < high:
        middle = (low + high) // 2
        if order.before(freer, compute[middle]):
            high = middle
        else:
            low = middle + 1
    return low
