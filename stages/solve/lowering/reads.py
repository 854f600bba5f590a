"""Reads in the order of their use, as early as there is room: what a placement's `moving_bytes` asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.artifacts.plan import Buffer
from stages.solve.lowering.draft import PhaseDraft
from stages.solve.problem import align


@dataclass(frozen=True)
class QueuedRead:
    """Slots to fill together.

    order: of their first use; ties are read in the order of the queue. claims: slots that their update
    fills with what is written afterwards; kept from now on, or each update would wait until the one before
    it has been written.
    """

    buffers: tuple[int, ...]
    order: tuple[int, ...]
    claims: tuple[int, ...] = ()


class ReadAhead:
    """Emits queued reads while what is on the device and moves stays within a capacity.

    Earliest use first, each as early as room allows: no other order of the same reads ends sooner.

    Args:
        reads: In the order of their first use.
        capacity_bytes: Slots of moving buffers at any point of the program. What is needed at once is
            read even beyond it.
    """

    def __init__(
        self, draft: PhaseDraft, buffers: Sequence[Buffer], reads: Iterable[QueuedRead], capacity_bytes: int
    ) -> None:
        self._draft = draft
        self._buffers = buffers
        self._queue = deque(reads)
        self._capacity_bytes = capacity_bytes
        self._inside: dict[int, int] = {}
        self._inside_bytes = 0
        self._seen = 0
        self._full = False
        #: what is used later than this waits: other reads come first
        self.until: tuple[int, ...] | None = None

    def advance(self) -> None:
        """Emits what there is room for."""
        if not self._queue or (self._full and len(self._draft.residencies) == self._seen):
            return  # nothing has left since there was no room
        self._settle()
        self._full = True
        room = self._capacity_bytes - self._inside_bytes
        while self._queue:
            read = self._queue[0]
            if self.until is not None and read.order > self.until:
                self._full = False
                return
            size = sum([self._bytes(buffer) for buffer in (*read.buffers, *read.claims)])
            # one that is still there for an earlier use cannot be read again yet
            if size > room or any(map(self._draft.is_present, read.buffers)):
                return
            room -= size
            self._emit()

    def require(self, order: tuple[int, ...]) -> None:
        """Emits whatever is first used at `order` or before and has not been emitted."""
        while self._queue and self._queue[0].order <= order:
            self._settle()
            self._full = False
            self._emit()

    def _settle(self) -> None:
        """Takes account of what has left."""
        ended = self._draft.residencies
        for stay in ended[self._seen :]:
            self._inside_bytes -= self._inside.pop(stay.buffer, 0)
        self._seen = len(ended)

    def _emit(self) -> None:
        read = self._queue.popleft()
        for buffer in read.claims:
            self._draft.claim(buffer)
        for buffer in read.buffers:
            self._draft.read(buffer)
        for buffer in (*read.buffers, *read.claims):
            self._inside[buffer] = self._bytes(buffer)
            self._inside_bytes += self._inside[buffer]

    def _bytes(self, buffer: int) -> int:
        return align(self._buffers[buffer].bytes)
