"""What every kind of lane offers: submit a job with its dependencies, wait for its event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class LanesStoppedError(Exception):
    """A job was not run because another one failed. The failure itself is what the caller gets."""


@dataclass
class Board:
    """What all lanes of one phase share: who is done, and whether somebody failed.

    One condition serves all events. A phase has some thousand instructions at most, each far longer
    than a wake-up, and a failure must wake every waiter.
    """

    condition: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Records the first failure and wakes everybody."""
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()


class Event:
    """The end of one job.

    start_ns and end_ns are of `time.perf_counter_ns`, once done.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.done = False
        self.start_ns = 0
        self.end_ns = 0

    def wait(self) -> None:
        """Returns when the job has run.

        Raises:
            LanesStoppedError: Some job of the phase failed, so this one may never run.
        """
        if self.done:  # a finished job stays finished: no lock needed
            return
        with self.board.condition:
            self.board.condition.wait_for(lambda: self.done or self.board.failure is not None)
        if not self.done:
            raise LanesStoppedError

    def run(self, job: Callable[[], None]) -> None:
        """Runs the job in the calling thread, and tells everybody that it is done."""
        self.start_ns = time.perf_counter_ns()
        job()
        self.end_ns = time.perf_counter_ns()
        with self.board.condition:
            self.done = True
            self.board.condition.notify_all()


class Lane(Protocol):
    """An ordered queue: jobs run one at a time, in the order in which they were submitted."""

    def submit(self, job: Callable[[], None], after: Sequence[Event], board: Board) -> Event:
        """Queues `job` to run after the lane's earlier jobs and the events in `after`."""
        ...

    def drain(self) -> None:
        """Returns when no job is running and none is queued; queued ones are dropped after a failure."""
        ...

    def close(self) -> None:
        """Ends the lane; nothing of it is left running."""
        ...
