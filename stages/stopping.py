"""SIGTERM and SIGINT: what ends at once, and training, which finishes its step and saves first.

Both ends of it. The composing process passes a signal on; a stage raises `Stopped` where it stands,
so that files are removed on the way out; training notes the request and heeds it between two steps.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: what a person or a service manager sends
SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: How the composing process passes a first and a second one on to training. Signals of their own, because a
#: service manager sends its own to every process of a job: training must not take one request for two.
STOP = signal.SIGUSR1
END = signal.SIGUSR2
ALL = (*SIGNALS, STOP, END)
#: environment variable with the process that a stage must not outlive
PARENT = "STAGES_PARENT"
_PR_SET_PDEATHSIG = 1


class Stopped(KeyboardInterrupt):
    """A signal ended the work. Like its base, nothing that handles errors handles it.

    Args:
        number: Of the signal.
        message: What the person should know, as how to go on; "": nothing.
        resume: Where training can go on from.
    """

    def __init__(self, number: int, message: str = "", resume: str = "") -> None:
        super().__init__(number)
        self.number = number
        self.message = message
        self.resume = resume

    def to_record(self) -> dict[str, object]:
        """The content of `error.json`."""
        return {
            "kind": "stopped",
            "message": self.message,
            "key": "resume" if self.resume else "",
            "found": signal_name(self.number),
            "expected": f"resume={self.resume}" if self.resume else "",
            "least_feasible_bytes": None,
        }


def exit_code_of(number: int) -> int:
    """128 + the signal's number; of one that was passed on, SIGTERM's."""
    return 128 + (signal.SIGTERM if number in (STOP, END) else number)


def signal_name(number: int) -> str:
    return "a request to stop" if number in (STOP, END) else signal.Signals(number).name


@contextmanager
def ending_by_exception() -> Iterator[None]:
    """A first signal ends the work inside with `Stopped`; later ones must not cut short the cleaning up."""
    handlers = {number: signal.signal(number, _end) for number in ALL}
    try:
        yield
    finally:
        _restore(handlers)


def _end(number: int, frame: FrameType | None) -> None:
    ignore_more()
    raise Stopped(number)


def ignore_more() -> None:
    for number in ALL:
        signal.signal(number, signal.SIG_IGN)


class Requests:
    """Requests to end that have come, each counted once however many ways it came.

    Attributes:
        number: The first signal's, the person's own where it came too; 0: no request.
    """

    def __init__(self) -> None:
        self.number = 0
        self._direct = 0
        self._end = False

    def note(self, number: int) -> None:
        self._direct += number in SIGNALS
        self._end |= number == END
        if self.number in (0, STOP):
            self.number = number

    @property
    def twice(self) -> bool:
        """Whether the work should end without finishing anything."""
        return self._end or self._direct > 1


class StopRequest:
    """A request to end, which training heeds between two steps.

    Until `deferred` is entered, and again after it, a request raises `Stopped` at once; so does a second
    one inside it.
    """

    def __init__(self) -> None:
        self._requests = Requests()
        self._deferred = False

    @property
    def number(self) -> int:
        """The signal's; 0: no request."""
        return self._requests.number

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listens to signals; in the main thread only, as Python wants it."""
        handlers = {number: signal.signal(number, self._receive) for number in ALL}
        try:
            yield
        finally:
            _restore(handlers)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        first = not self.number
        self._requests.note(number)
        if not self._deferred or self._requests.twice:
            ignore_more()
            raise Stopped(self.number)
        if first:
            # not print: the signal may have come in the middle of one
            os.write(1, f"{signal_name(number)}: ends after this step\n".encode())


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent dies, however it dies (kill -9 included)."""
    parent = os.environ.get(PARENT)
    if parent is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)
