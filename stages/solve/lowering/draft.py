"""A phase while it is being written down: instruction ids, versions and data dependencies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from stages.artifacts.plan import Access, Instruction, Location, Phase


@dataclass
class Draft:
    """An instruction whose dependencies may still grow."""

    id: int
    lane: str
    operation: str
    after: set[int]
    reads: list[Access]
    writes: list[Access]
    frees: list[int]
    region: int = -1
    micro_batch: int = 0
    mode: str = ""
    parameter: str = ""
    start: int = 0
    count: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True)
class Residency:
    """One stay of a buffer on the device: from the instruction that makes it to the one that frees it.

    claimed: the instruction from which its slot is kept for it, if that is before it is made.
    """

    buffer: int
    made: int
    freed: int
    claimed: int


@dataclass
class PhaseDraft:
    """Emits instructions in an order that is topological by construction.

    Args:
        device: Buffers on the device at entry.
        disk: Buffers on disk at entry.
    """

    name: str
    device: list[int]
    disk: list[int]
    drafts: list[Draft] = field(default_factory=list)
    residencies: list[Residency] = field(default_factory=list)
    last_compute: int = -1
    #: buffers made in this phase whose content on disk outlives it
    leaving: set[int] = field(default_factory=set)
    #: buffers on disk at entry whose content means nothing after the phase
    consumed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._entry = [Location(buffer, "device", 1) for buffer in self.device]
        self._entry += [Location(buffer, "disk", 1) for buffer in self.disk]
        self._version = dict.fromkeys((location.buffer for location in self._entry), 1)
        self._disk_version = {item.buffer: 1 for item in self._entry if item.tier == "disk"}
        self._content_maker: dict[int, int] = {}
        self._disk_writer: dict[int, int] = {}
        #: buffer -> id that made its present copy on the device; -1 for those of the entry
        self._present = {item.buffer: -1 for item in self._entry if item.tier == "device"}
        self._claimed: dict[int, int] = {}

    def is_present(self, buffer: int) -> bool:
        return buffer in self._present

    def read(self, buffer: int, after: Iterable[int] = ()) -> int:
        """Fetches `buffer` from its extent."""
        waits = {*after, self._disk_writer.get(buffer, -1)} - {-1}
        draft = self._add("read", "read", waits)
        draft.writes.append(Access(buffer, self._disk_version[buffer]))
        self._content_maker[buffer] = draft.id
        self._present[buffer] = draft.id
        return draft.id

    def fetch(self, buffer: int, *, outside_arena: bool) -> int:
        """Reads `buffer` where `prefetch` says. Only what takes new memory must not come before the slot in
        front has ended; a slot in the arena waits for its bytes by itself."""
        return self.read(buffer, after=[self.last_compute] if outside_arena else [])

    def claim(self, buffer: int) -> None:
        """Keeps a slot for what a later instruction makes, so that it need not wait for one then."""
        self._claimed[buffer] = len(self.drafts)

    def write(self, buffer: int, *, free: bool) -> int:
        """Stores `buffer` in its extent; `free` ends its stay on the device."""
        waits = {self._content_maker.get(buffer, -1)} - {-1}
        draft = self._add("write", "write", waits)
        draft.reads.append(Access(buffer, self._version[buffer]))
        self._disk_version[buffer] = self._version[buffer]
        self._disk_writer[buffer] = draft.id
        if free:
            self._end(draft, [buffer])
        return draft.id

    def compute(
        self,
        operation: str,
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        frees: Iterable[int] = (),
        after: Iterable[int] = (),
        region: int = -1,
        micro_batch: int = 0,
        mode: str = "",
        workspace_bytes: int = 0,
    ) -> Draft:
        reads, writes = list(reads), list(writes)
        waits = {maker for buffer in reads if (maker := self._content_maker.get(buffer, -1)) >= 0}
        draft = self._add("compute", operation, waits | set(after))
        draft.region, draft.mode, draft.workspace_bytes = region, mode, workspace_bytes
        draft.micro_batch = micro_batch
        draft.reads.extend(Access(buffer, self._version[buffer]) for buffer in reads)
        for buffer in writes:
            self._version[buffer] = self._version.get(buffer, 0) + 1
            self._content_maker[buffer] = draft.id
            self._present.setdefault(buffer, draft.id)
            draft.writes.append(Access(buffer, self._version[buffer]))
        self._end(draft, frees)
        self.last_compute = draft.id
        return draft

    def _add(self, lane: str, operation: str, after: set[int]) -> Draft:
        other_lanes = {identity for identity in after if self.drafts[identity].lane != lane}
        draft = Draft(len(self.drafts), lane, operation, other_lanes, [], [], [])
        self.drafts.append(draft)
        return draft

    def _end(self, draft: Draft, buffers: Iterable[int]) -> None:
        for buffer in buffers:
            draft.frees.append(buffer)
            made = self._present.pop(buffer)
            claimed = min(made, self._claimed.pop(buffer, made))
            self.residencies.append(Residency(buffer, made, draft.id, claimed))

    def finish(self, successors: list[str]) -> Phase:
        """The phase; `entry` and `exit` say what is where."""
        leave = [Location(buffer, "device", self._version[buffer]) for buffer in self._present]
        kept = [buffer for buffer in self.disk if buffer not in self.consumed] + sorted(self.leaving)
        leave += [Location(buffer, "disk", self._disk_version[buffer]) for buffer in kept]
        instructions = [
            Instruction(
                id=draft.id,
                lane=draft.lane,
                operation=draft.operation,
                after=sorted(draft.after),
                reads=draft.reads,
                writes=draft.writes,
                frees=draft.frees,
                region=draft.region,
                micro_batch=draft.micro_batch,
                mode=draft.mode,
                parameter=draft.parameter,
                start=draft.start,
                count=draft.count,
                workspace_bytes=draft.workspace_bytes,
            )
            for draft in self.drafts
        ]
        return Phase(self.name, instructions, self._entry, leave, successors)
