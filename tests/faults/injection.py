"""Faults of the operating system on purpose: which call on which files fails, and how.

The system calls are those of the module `os`, as this tool makes them. In this process:

    with injected(Fault("write", "ENOSPC", path="scratch", at=3)):
        ...

In the stage processes of a command: its environment gets `environment_of(...)`, through which
`preloaded/sitecustomize.py` does the same in each process before anything else runs.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

#: name in a fault -> functions of `os`
CALLS = {
    "read": ("preadv",),
    "write": ("pwritev",),
    "reserve": ("posix_fallocate",),
    "sync": ("fsync", "fdatasync"),
    "rename": ("rename", "replace"),
    "make": ("mkdir", "open"),
}
#: kinds of fault beside the names of error numbers
SHORT, DELAY, KILL = "short", "delay", "kill"
VARIABLE = "STAGES_TEST_FAULTS"
_BLOCK_BYTES = 4096
_DELAY_S = 0.003


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Attributes:
        call: A key of `CALLS`.
        kind: The name of an error number ("EIO"); "short": fewer bytes than asked for are moved; "delay"; or
            "kill": the process ends there, by SIGKILL.
        path: What the file's path must contain.
        at: The first matching call that fails, counted from 1.
        lasting: Whether all that follow fail too.
        stage: The module whose process it happens in; "": every one. For commands alone.
    """

    call: str
    kind: str
    path: str = ""
    at: int = 1
    lasting: bool = False
    stage: str = ""


class Injector:
    """Counts calls, and lets those fail that should. `happened` counts the faults."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._seen = [0] * len(faults)
        self._lock = threading.Lock()
        self.happened = 0

    def replacement(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for the function `real` of `os`."""

        def function(*arguments: Any, **settings: Any) -> Any:
            if real.__name__ == "open" and not arguments[1] & os.O_CREAT:
                return real(*arguments, **settings)
            fault = self._due(call, arguments[0])
            if fault is None:
                return real(*arguments, **settings)
            if fault.kind == KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault.kind == DELAY:
                time.sleep(_DELAY_S)
                return real(*arguments, **settings)
            if fault.kind == SHORT:
                return _fewer(real(*arguments, **settings))
            number = getattr(errno, fault.kind)
            raise OSError(number, os.strerror(number))

        return function

    def _due(self, call: str, target: object) -> Fault | None:
        path = _path_of(target)
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.call != call or fault.path not in path:
                    continue
                self._seen[index] += 1
                seen = self._seen[index]
                if seen == fault.at or (fault.lasting and seen > fault.at):
                    self.happened += 1
                    return fault
        return None


def _path_of(target: object) -> str:
    if isinstance(target, int):
        try:
            return os.readlink(f"/proc/self/fd/{target}")
        except OSError:
            return ""
    return os.fspath(target)  # type: ignore[call-overload]


def _fewer(moved: int) -> int:
    """As the kernel may: never less than a block of direct I/O, and not always a multiple of one."""
    return moved if moved <= 2 * _BLOCK_BYTES else moved // 2 + 1


@contextmanager
def injected(*faults: Fault) -> Iterator[Injector]:
    """The faults happen in this process meanwhile."""
    injector = Injector(faults)
    with ExitStack() as stack:
        for call in {fault.call for fault in faults}:
            for name in CALLS[call]:
                replaced = injector.replacement(call, getattr(os, name))
                stack.enter_context(mock.patch.object(os, name, replaced))
        yield injector


def environment_of(*faults: Fault) -> dict[str, str]:
    """What a command's environment gets, so that the faults happen in the processes that it starts."""
    paths = [str(Path(__file__).parent / "preloaded"), os.environ.get("PYTHONPATH", "")]
    encoded = json.dumps([asdict(fault) for fault in faults])
    return {VARIABLE: encoded, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def inject_here(environment: Mapping[str, str]) -> None:
    """For the rest of this process, the faults that `environment` has for the module that it runs."""
    faults = [Fault(**fields) for fields in json.loads(environment.get(VARIABLE, "[]"))]
    mine = [fault for fault in faults if not fault.stage or fault.stage in sys.orig_argv]
    if not mine:
        return
    injector = Injector(mine)
    for call in {fault.call for fault in mine}:
        for name in CALLS[call]:
            setattr(os, name, injector.replacement(call, getattr(os, name)))
