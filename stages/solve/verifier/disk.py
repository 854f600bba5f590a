"""Homes on disk and in host memory: disjoint, except that a tensor and its pieces share one."""

from __future__ import annotations

from collections import defaultdict

from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import ALIGNMENT, BOUNCE_BYTES, Buffer, Plan, bookkeeping_bytes
from stages.solve.errors import PlanError

#: buffer -> other buffers whose homes share bytes with its own
Aliases = dict[int, list[int]]


def check_homes(plan: Plan, graph: RegionGraph, costs: Costs) -> Aliases:
    """Checks extents.

    Args:
        graph, costs: Of one micro-batch; they say how large what autograd keeps of a region is.

    Raises:
        PlanError: An extent is misaligned, beyond its home, or shared by two tensors; or one tensor has
            two homes.
    """
    tiers: dict[tuple[str, str, str, int], str] = {}
    for buffer in plan.buffers:
        if buffer.extent is not None:
            _require_home(plan, buffer)
            key = (buffer.role, buffer.owner, buffer.state, buffer.micro_batch)
            if tiers.setdefault(key, buffer.home) != buffer.home:
                raise PlanError(f"{buffer.role} of {buffer.owner} has homes on disk and in host memory")
    saved_bytes = _saved_bytes(graph, costs)
    aliases = _check_tier(plan, "disk", plan.disk_bytes, saved_bytes)
    return {**aliases, **_check_tier(plan, "host", plan.host_pool_bytes, saved_bytes)}


def _saved_bytes(graph: RegionGraph, costs: Costs) -> dict[str, int]:
    """Region -> bytes at home of what autograd keeps: each storage lies on a border of its own."""
    kinds = {
        cost.kind: sum(-(-size // ALIGNMENT) * ALIGNMENT for size in cost.saved_storages)
        for cost in costs.regions
    }
    return {region.name: kinds.get(region.kind, 0) for region in graph.regions}


def _require_home(plan: Plan, buffer: Buffer) -> None:
    allowed = ("disk",) if plan.device == "cpu" else ("host", "disk")
    if buffer.home not in allowed:
        raise PlanError(
            f"buffer {buffer.id} ({buffer.role} of {buffer.owner}) waits in {buffer.home}; expected "
            f"{' or '.join(allowed)} on the device {plan.device}"
        )


def check_host(plan: Plan, costs: Costs, host_budget_bytes: int | None) -> None:
    """Checks what host memory must hold beside an accelerator.

    Raises:
        PlanError: The plan says less than it needs, or needs more than is allowed.
    """
    if plan.device == "cpu":
        return
    records = bookkeeping_bytes(sum(len(phase.instructions) for phase in plan.phases), len(plan.buffers))
    passes = any(buffer.extent is not None and buffer.home == "disk" for buffer in plan.buffers)
    needed = costs.host_baseline_bytes + records + plan.host_pool_bytes + (BOUNCE_BYTES if passes else 0)
    if plan.host_bytes < needed:
        raise PlanError(f"the plan books {plan.host_bytes} bytes of host memory; it needs {needed}")
    if host_budget_bytes is not None and plan.host_bytes > host_budget_bytes:
        raise PlanError(
            f"{plan.host_bytes} bytes of host memory; tiers.host_budget allows {host_budget_bytes}"
        )


def _check_tier(plan: Plan, home: str, size_bytes: int, saved_bytes: dict[str, int]) -> Aliases:
    homes = [
        (buffer.extent, buffer)
        for buffer in plan.buffers
        if buffer.extent is not None and buffer.home == home
    ]
    aliases: Aliases = defaultdict(list)
    reach: list[tuple[int, int, Buffer]] = []
    for start, buffer in sorted(homes, key=lambda home: (home[0], home[1].id)):
        held = max(buffer.bytes, saved_bytes[buffer.owner] if buffer.role == "saved" else 0)
        end = start + -(-held // ALIGNMENT) * ALIGNMENT
        if start < 0 or start % ALIGNMENT or end > size_bytes:
            raise PlanError(
                f"buffer {buffer.id} ({buffer.role} of {buffer.owner}) lies at {start} to {end} on {home}; "
                f"expected a multiple of {ALIGNMENT} within {size_bytes} bytes"
            )
        reach = [other for other in reach if other[1] > start]
        for other_start, _, other in reach:
            if not _same_tensor(start, buffer, other_start, other):
                raise PlanError(
                    f"buffers {other.id} ({other.role} of {other.owner}) and {buffer.id} ({buffer.role} of "
                    f"{buffer.owner}) share bytes on {home}"
                )
            aliases[buffer.id].append(other.id)
            aliases[other.id].append(buffer.id)
        reach.append((start, end, buffer))
    return aliases


def _tensor(buffer: Buffer) -> tuple[str, str, str, int]:
    return buffer.role, buffer.owner, buffer.state, buffer.micro_batch


def _same_tensor(start: int, buffer: Buffer, other_start: int, other: Buffer) -> bool:
    """Whether two homes that share bytes are elements of one tensor, each in its right place."""
    if _tensor(buffer) != _tensor(other):
        return False
    if not buffer.count or not other.count:
        # a gradient as a whole has no count; its pieces begin where it does
        whole, piece = (other_start, start) if not other.count else (start, other_start)
        return whole <= piece
    size = buffer.bytes // buffer.count
    return start - buffer.start * size == other_start - other.start * size
