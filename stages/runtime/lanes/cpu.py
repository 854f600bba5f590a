"""A lane that is a worker thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stages.runtime.lanes.interface import Board, Event, LanesStoppedError


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]
    after: Sequence[Event]
    event: Event


class ThreadLane:
    """One thread with a first-in-first-out queue.

    Jobs should release the GIL in what takes long (system calls do) and start no parallel torch
    operator: each thread that does gets a pool of OpenMP threads of its own, with their stacks.

    Args:
        name: Of the thread, as debuggers show it.
    """

    def __init__(self, name: str) -> None:
        self._queue: queue.Queue[_Job | None] = queue.Queue()
        # daemon: a process that dies of an error in the main thread must not hang in its lanes
        self._thread = threading.Thread(target=self._work, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], after: Sequence[Event], board: Board) -> Event:
        event = Event(board)
        self._queue.put(_Job(job, after, event))
        return event

    def drain(self) -> None:
        self._queue.join()

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            self._perform(job)
            # What a job holds (its tensors) must go before anybody may think that it has gone.
            del job
            self._queue.task_done()
        self._queue.task_done()

    @staticmethod
    def _perform(job: _Job) -> None:
        board = job.event.board
        if board.failure is not None:
            return
        try:
            for event in job.after:
                event.wait()
            job.event.run(job.run)
        except LanesStoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - the main thread raises it in this one's place
            board.fail(error)
