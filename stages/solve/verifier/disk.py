"""Homes on disk: disjoint, except that a tensor and its pieces share one."""

from __future__ import annotations

from collections import defaultdict

from stages.artifacts.plan import ALIGNMENT, Buffer, Plan
from stages.solve.errors import PlanError

#: buffer -> other buffers whose homes share bytes with its own
Aliases = dict[int, list[int]]


def check_homes(plan: Plan) -> Aliases:
    """Checks extents.

    Raises:
        PlanError: An extent is misaligned, beyond the file, or shared by two tensors.
    """
    homes = [(buffer.extent, buffer) for buffer in plan.buffers if buffer.extent is not None]
    aliases: Aliases = defaultdict(list)
    reach: list[tuple[int, int, Buffer]] = []
    for start, buffer in sorted(homes, key=lambda home: (home[0], home[1].id)):
        end = start + -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
        if start < 0 or start % ALIGNMENT or end > plan.disk_bytes:
            raise PlanError(
                f"buffer {buffer.id} ({buffer.role} of {buffer.owner}) lies at {start} to {end} on disk; "
                f"expected a multiple of {ALIGNMENT} within {plan.disk_bytes} bytes"
            )
        reach = [other for other in reach if other[1] > start]
        for other_start, _, other in reach:
            if not _same_tensor(start, buffer, other_start, other):
                raise PlanError(
                    f"buffers {other.id} ({other.role} of {other.owner}) and {buffer.id} ({buffer.role} of "
                    f"{buffer.owner}) share bytes on disk"
                )
            aliases[buffer.id].append(other.id)
            aliases[other.id].append(buffer.id)
        reach.append((start, end, buffer))
    return aliases


def _same_tensor(start: int, buffer: Buffer, other_start: int, other: Buffer) -> bool:
    """Whether two homes that share bytes are elements of one tensor, each in its right place."""
    if (buffer.role, buffer.owner, buffer.state) != (other.role, other.owner, other.state):
        return False
    if not buffer.count or not other.count:
        # a gradient as a whole has no count; its pieces begin where it does
        whole, piece = (other_start, start) if not other.count else (start, other_start)
        return whole <= piece
    size = buffer.bytes // buffer.count
    return start - buffer.start * size == other_start - other.start * size
