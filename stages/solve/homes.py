"""Where what leaves the device waits: host memory, and beyond its capacity the disk.

Without an accelerator the device tier is host memory itself, and the only home is the disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import BOUNCE_BYTES, Buffer, bookkeeping_bytes
from stages.solve.lowering.draft import Draft
from stages.solve.problem import HostTier, Problem, align

#: among tensors that move equally often per byte: those that a step waits for soonest come first
_RANK = {"weight": 0, "saved": 1, "value": 2, "gradient": 3, "master": 4, "state": 5}


#: role, owner, state and micro-batch: what an extent belongs to
Key = tuple[str, str, str, int]


@dataclass(frozen=True)
class Tenant:
    """A tensor that needs a home. bytes: of its extent; moved_bytes: in a step, both ways."""

    key: Key  # role, owner, state or micro-batch
    bytes: int
    moved_bytes: int


@dataclass(frozen=True)
class Homes:
    """Buffers with their homes and extents, and what each tier holds.

    pool_bytes: of extents in host memory; host_bytes: those, the process, its records of the plan, and
    the bounce buffers of what passes through to the disk.
    """

    buffers: list[Buffer]
    pool_bytes: int
    host_bytes: int
    disk_bytes: int


def choose_disk(tenants: Iterable[Tenant], room_bytes: int) -> frozenset[Key]:
    """The keys of the tenants whose home is the disk: host memory takes the most moved per byte first.

    Args:
        room_bytes: Of host memory for all of them.
    """
    ordered = sorted(tenants, key=lambda item: (-item.moved_bytes / item.bytes, _RANK[item.key[0]]))
    if sum(tenant.bytes for tenant in ordered) > room_bytes:
        room_bytes -= BOUNCE_BYTES
    far = set()
    for tenant in ordered:
        if tenant.bytes <= room_bytes:
            room_bytes -= tenant.bytes
        else:
            far.add(tenant.key)
    return frozenset(far)


def give_homes(
    problem: Problem, buffers: list[Buffer], phases: Sequence[Sequence[Draft]], disk_bytes: int
) -> Homes:
    """Gives every extent its home. Without an accelerator nothing changes.

    Args:
        phases: The instructions of each phase.
        disk_bytes: Of all extents, as lowering numbered them.
    """
    if problem.host is None:
        return Homes(buffers, 0, 0, disk_bytes)
    records = bookkeeping_bytes(sum(map(len, phases)), len(buffers))
    tenants = _tenants(problem, buffers, phases)
    far = choose_disk(tenants, problem.host.room_bytes - records)
    starts: dict[Key, int] = {}
    ends = {"host": 0, "disk": 0}
    for tenant in tenants:
        home = "disk" if tenant.key in far else "host"
        starts[tenant.key] = ends[home]
        ends[home] += tenant.bytes
    old = _first_extents(buffers)
    placed = [
        buffer
        if buffer.extent is None
        else msgspec.structs.replace(
            buffer,
            extent=buffer.extent - old[_key(buffer)] + starts[_key(buffer)],
            home="disk" if _key(buffer) in far else "host",
        )
        for buffer in buffers
    ]
    bounce = BOUNCE_BYTES if far else 0
    host_bytes = problem.host.fixed_bytes + records + ends["host"] + bounce
    return Homes(placed, ends["host"], host_bytes, ends["disk"])


def _key(buffer: Buffer) -> Key:
    return (buffer.role, buffer.owner, buffer.state, buffer.micro_batch)


def _first_extents(buffers: Iterable[Buffer]) -> dict[Key, int]:
    first: dict[Key, int] = {}
    for buffer in buffers:
        if buffer.extent is not None:
            first[_key(buffer)] = min(first.get(_key(buffer), buffer.extent), buffer.extent)
    return first


def _tenants(problem: Problem, buffers: Sequence[Buffer], phases: Iterable[Iterable[Draft]]) -> list[Tenant]:
    """Tensors with an extent, in the order of their buffers."""
    saved_bytes = {region.name: region.saved_extent_bytes for region in problem.regions}
    moved: dict[Key, int] = defaultdict(int)
    for phase in phases:
        for draft in phase:
            if draft.lane != "compute":
                for access in (*draft.reads, *draft.writes):
                    moved[_key(buffers[access.buffer])] += buffers[access.buffer].bytes
    first, last = _first_extents(buffers), {}
    for buffer in buffers:
        if buffer.extent is not None:
            # what autograd keeps is several storages, each of which starts on a border of its own
            size = saved_bytes[buffer.owner] if buffer.role == "saved" else buffer.bytes
            end = buffer.extent + align(max(1, size))
            last[_key(buffer)] = max(last.get(_key(buffer), 0), end)
    return [Tenant(key, end - first[key], moved[key]) for key, end in last.items()]


def require_tiers(problem: Problem, limit_bytes: int, disk_budget_bytes: int | None) -> None:
    """Refuses at once what no placement can hold: training state beyond the device's budget, host
    memory and the disk together.

    Raises:
        InfeasibleBudgetError: Names the tier that is short, needed and available bytes.
    """
    host = problem.host
    if host is None:
        return
    if host.room_bytes <= 0:
        raise InfeasibleBudgetError(
            f"the training process alone needs {host.fixed_bytes} bytes of host memory; tiers.host_budget "
            f"(or hardware.host_memory) allows {host.capacity_bytes}. Raise it",
            key="tiers.host_budget",
            found=str(host.capacity_bytes),
            expected=f"more than {host.fixed_bytes} bytes",
        )
    state = sum(
        align(item.bytes) + sum(align(piece.bytes) for piece in item.pieces)
        for item in problem.parameters.values()
    )
    beyond = state - limit_bytes
    if disk_budget_bytes is not None and beyond > host.room_bytes + disk_budget_bytes:
        raise tiers_short(host, beyond - host.room_bytes, disk_budget_bytes, state)


def tiers_short(
    host: HostTier, needed_on_disk: int, disk_budget_bytes: int, state_bytes: int | None = None
) -> InfeasibleBudgetError:
    """The refusal of what host memory and disk together do not hold."""
    of = "" if state_bytes is None else f" (weights and optimizer state are {state_bytes} bytes)"
    return InfeasibleBudgetError(
        f"beyond the device, {host.capacity_bytes} bytes of host memory (tiers.host_budget, or "
        f"hardware.host_memory) and at least {needed_on_disk} bytes on disk are needed{of}; "
        f"tiers.disk_budget (or hardware.disk) allows {disk_budget_bytes}. Raise one of the two, or the "
        f"budget, or use a smaller model",
        key="tiers.disk_budget",
        found=f"{disk_budget_bytes} bytes of disk, {host.capacity_bytes} bytes of host memory",
        expected=f"at least {needed_on_disk} bytes of disk",
    )


@dataclass(frozen=True)
class Spill:
    """What of a choice waits on disk because host memory is full: weight groups, state groups, and
    whether activations and gradients do. An estimate of `give_homes`, by groups."""

    weights: frozenset[int] = frozenset()
    states: frozenset[int] = frozenset()
    activations: bool = False


NO_SPILL = Spill()


def spill_of(room_bytes: int, weights: Sequence[int], activations_bytes: int, states: Sequence[int]) -> Spill:
    """Args:
    room_bytes: Of host memory.
    weights, states: Bytes that each group has beyond the device; 0 where it is resident.
    activations_bytes: Of activations and gradients that move.
    """
    if sum(weights) + activations_bytes + sum(states) <= room_bytes:
        return NO_SPILL
    left = room_bytes - BOUNCE_BYTES
    far_weights, left = _fill(weights, left)
    activations = activations_bytes > left
    far_states, _ = _fill(states, left if activations else left - activations_bytes)
    return Spill(far_weights, far_states, activations)


def _fill(sizes: Sequence[int], room_bytes: int) -> tuple[frozenset[int], int]:
    """The groups that do not fit, first come first served, and the room that is left."""
    far = set()
    for index, size in enumerate(sizes):
        if size <= room_bytes:
            room_bytes -= size
        else:
            far.add(index)
    return frozenset(far), room_bytes
