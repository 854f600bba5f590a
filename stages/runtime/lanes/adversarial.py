"""A lane for tests: each job runs at the last moment that the program allows.

A worker thread is nearly always early, so a missing dependency hides behind good luck. Here nothing
runs until somebody waits for it: a transfer starts when an instruction that names it in `after` is
about to run (in that one's thread), or when the phase ends. What was used too early, or overwritten
or freed too early, then has the wrong content, every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from stages.runtime.lanes.interface import Board, Event


class LateEvent(Event):
    """An event whose job runs when it is waited for."""

    def __init__(self, board: Board, lane: LateLane) -> None:
        super().__init__(board)
        self._lane = lane

    def wait(self) -> None:
        self._lane.run_until(self)


class LateLane:
    """Holds its jobs, in order, until one of them is waited for."""

    def __init__(self) -> None:
        self._held: deque[tuple[LateEvent, Callable[[], None], Sequence[Event]]] = deque()

    def submit(self, job: Callable[[], None], after: Sequence[Event], board: Board) -> LateEvent:
        event = LateEvent(board, self)
        self._held.append((event, job, after))
        return event

    def run_until(self, last: LateEvent) -> None:
        """Runs the held jobs up to `last`: a lane is a queue, so its predecessors come first."""
        while not last.done:
            self._run_first()

    def drain(self) -> None:
        while self._held:
            if self._held[0][0].board.failure is not None:
                self._held.clear()
                return
            self._run_first()

    def close(self) -> None:
        self._held.clear()

    def _run_first(self) -> None:
        # Taken off the queue first: waiting below may come back to this lane by way of another.
        event, job, after = self._held.popleft()
        for dependency in after:
            dependency.wait()
        event.run(job)


def poison(tensor: torch.Tensor) -> None:
    """Overwrites `tensor` with what no computation can survive unnoticed.

    NaN in floating point and complex tensors, the largest value in integers (out of range of any
    index), inverted booleans.
    """
    with torch.no_grad():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(float("nan"))
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
