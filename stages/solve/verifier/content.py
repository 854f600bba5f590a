"""Every use meets the version it names, made before it and not yet gone or overwritten."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from stages.artifacts.plan import Access, Instruction, Phase, Plan
from stages.solve.errors import PlanError
from stages.solve.verifier.disk import Aliases
from stages.solve.verifier.order import Order

_STATE_ROLES = ("weight", "master", "state", "persistent")


@dataclass
class _Copy:
    """A buffer's content in one place. maker: the instruction that put it there; -1: the entry."""

    version: int
    maker: int
    users: list[int] = field(default_factory=list)
    stale: bool = False


def check_content(plan: Plan, phase: Phase, order: Order, aliases: Aliases) -> None:
    """Replays versions through the phase.

    Raises:
        PlanError: Names the instruction whose use is not certainly served.
    """
    replay = _Replay(plan, phase, order, aliases)
    for instruction in phase.instructions:
        replay.step(instruction)
    replay.finish()


class _Replay:
    def __init__(self, plan: Plan, phase: Phase, order: Order, aliases: Aliases) -> None:
        self._plan, self._phase, self._order, self._aliases = plan, phase, order, aliases
        self._device: dict[int, _Copy] = {}
        self._disk: dict[int, _Copy] = {}
        self._latest: dict[int, int] = {}
        for location in phase.entry:
            if not 0 <= location.buffer < len(plan.buffers) or location.version != 1:
                raise PlanError(f"phase {phase.name}: entry of buffer {location.buffer} is malformed")
            table = {"device": self._device, "disk": self._disk}.get(location.tier)
            if table is None or location.buffer in table:
                raise PlanError(f"phase {phase.name}: entry of buffer {location.buffer} is malformed")
            if location.tier == "disk" and plan.buffers[location.buffer].extent is None:
                raise PlanError(f"phase {phase.name}: buffer {location.buffer} has no home on disk")
            table[location.buffer] = _Copy(1, -1)
            self._latest[location.buffer] = 1
        for buffer in self._device:
            if not plan.buffers[buffer].resident and plan.buffers[buffer].role != "gradient":
                raise PlanError(f"phase {phase.name}: buffer {buffer} is on the device at entry")

    def step(self, instruction: Instruction) -> None:
        for access in (*instruction.reads, *instruction.writes):
            if not 0 <= access.buffer < len(self._plan.buffers):
                self._fail(instruction, access.buffer, "does not exist")
        if instruction.lane == "read":
            self._read(instruction, self._only(instruction, instruction.writes, instruction.reads))
        elif instruction.lane == "write":
            self._write(instruction, self._only(instruction, instruction.reads, instruction.writes))
        else:
            for access in instruction.reads:
                self._use(instruction, access)
            for access in instruction.writes:
                self._make(instruction, access)
        for buffer in instruction.frees:
            self._free(instruction, buffer)

    def _only(self, instruction: Instruction, wanted: list[Access], other: list[Access]) -> Access:
        if len(wanted) != 1 or other:
            raise PlanError(f"{self._order.name(instruction.id)} must move exactly one buffer")
        if self._plan.buffers[wanted[0].buffer].extent is None:
            self._fail(instruction, wanted[0].buffer, "has no home on disk")
        return wanted[0]

    def _use(self, instruction: Instruction, access: Access) -> None:
        copy = self._device.get(access.buffer)
        if copy is None:
            self._fail(instruction, access.buffer, "is not on the device")
        if copy.version != access.version:
            self._fail(
                instruction, access.buffer, f"is there in version {copy.version}, not {access.version}"
            )
        if not self._order.before(copy.maker, instruction.id):
            self._fail(instruction, access.buffer, f"may not be there yet: {copy.maker} makes it")
        copy.users.append(instruction.id)

    def _make(self, instruction: Instruction, access: Access) -> None:
        copy = self._device.get(access.buffer)
        expected = self._latest.get(access.buffer, 0) + 1
        if access.version != expected:
            self._fail(instruction, access.buffer, f"becomes version {expected} here, not {access.version}")
        if copy is not None:
            for user in (copy.maker, *copy.users):
                if user != instruction.id and not self._order.before(user, instruction.id):
                    self._fail(instruction, access.buffer, f"may still be in use by {user}")
        self._latest[access.buffer] = access.version
        self._device[access.buffer] = _Copy(access.version, instruction.id)

    def _read(self, instruction: Instruction, access: Access) -> None:
        if access.buffer in self._device:
            self._fail(instruction, access.buffer, "is on the device already")
        stored = self._disk.get(access.buffer)
        if stored is None or stored.version != access.version or stored.stale:
            self._fail(instruction, access.buffer, f"is not on disk in version {access.version}")
        if access.version != self._latest[access.buffer]:
            self._fail(instruction, access.buffer, "has a later version, which is lost")
        if not self._order.before(stored.maker, instruction.id):
            self._fail(instruction, access.buffer, f"may not be on disk yet: {stored.maker} writes it")
        stored.users.append(instruction.id)
        self._device[access.buffer] = _Copy(access.version, instruction.id)

    def _write(self, instruction: Instruction, access: Access) -> None:
        self._use(instruction, access)
        for buffer in (access.buffer, *self._aliases.get(access.buffer, ())):
            stored = self._disk.get(buffer)
            if stored is None:
                continue
            for user in (stored.maker, *stored.users):
                if not self._order.before(user, instruction.id):
                    self._fail(instruction, buffer, f"may still be read from disk by {user}")
            stored.stale = stored.stale or buffer != access.buffer
        self._disk[access.buffer] = _Copy(access.version, instruction.id)

    def _free(self, instruction: Instruction, buffer: int) -> None:
        copy = self._device.get(buffer)
        if copy is None:
            self._fail(instruction, buffer, "is freed but not on the device")
        record = self._plan.buffers[buffer]
        if record.resident:
            self._fail(instruction, buffer, "is resident and cannot be freed")
        if instruction.lane == "read":
            self._fail(instruction, buffer, "cannot be freed by a read")
        for user in (copy.maker, *copy.users):
            if user != instruction.id and not self._order.before(user, instruction.id):
                self._fail(instruction, buffer, f"may still be in use by {user}")
        stored = self._disk.get(buffer)
        if record.role in _STATE_ROLES and (stored is None or stored.version != copy.version):
            self._fail(instruction, buffer, "is freed before its new content is on disk")
        del self._device[buffer]

    def finish(self) -> None:
        """The exit says what is where; nothing of the training state is lost."""
        phase = self._phase
        listed = {(item.buffer, item.tier): item.version for item in phase.exit}
        on_device = {(buffer, "device"): copy.version for buffer, copy in self._device.items()}
        if {key: version for key, version in listed.items() if key[1] == "device"} != on_device:
            raise PlanError(f"phase {phase.name}: its exit does not say what is on the device")
        for (buffer, tier), version in listed.items():
            stored = self._disk.get(buffer)
            if tier == "disk" and (stored is None or stored.version != version):
                raise PlanError(f"phase {phase.name}: buffer {buffer} is not on disk as its exit says")
        for buffer, copy in self._device.items():
            record = self._plan.buffers[buffer]
            if not record.resident and (record.role != "gradient" or record.offset is not None):
                raise PlanError(
                    f"phase {phase.name}: buffer {buffer} ({record.role} of {record.owner}), "
                    f"made by instruction {copy.maker}, is never freed"
                )
        for buffer, latest in self._latest.items():
            there = {copy.version for copy in (self._device.get(buffer), self._disk.get(buffer)) if copy}
            if self._plan.buffers[buffer].role in _STATE_ROLES and latest not in there:
                raise PlanError(f"phase {phase.name}: the last content of buffer {buffer} is lost")

    def _fail(self, instruction: Instruction, buffer: int, why: str) -> NoReturn:
        name = f"buffer {buffer}"
        if 0 <= buffer < len(self._plan.buffers):
            record = self._plan.buffers[buffer]
            name += f" ({record.role} of {record.owner})"
        raise PlanError(f"{self._order.name(instruction.id)}: {name} {why}")
