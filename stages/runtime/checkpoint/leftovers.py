"""What a process that was killed while it saved leaves: found by the lock that it no longer holds.

The kernel drops the lock of a dead process, so neither a reused process id nor another container that
shares the disk is mistaken for it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: see `write.save`: a state on its way in, and the one of the same step that it replaces
_REST = re.compile(r"\.(step-[0-9]+)\.[0-9]+\.(part|old)")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While inside, `folder` is known to belong to a living process, whatever its name becomes.

    Raises:
        OSError: It is not there, or another process holds it (as BlockingIOError).
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def clear_away(folder: Path) -> None:
    """Removes half-written states of dead processes; puts one back that was about to be replaced.

    What cannot be removed is left with a warning.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _REST.fullmatch(path.name):
            try:
                with held(path):
                    _clear(path, folder / match.group(1), replaced=match.group(2) == "old")
            except BlockingIOError:
                continue  # its process lives
            except OSError as error:
                warnings.warn(
                    f"cannot remove {path}, which a killed run left: {error.strerror or error}. Its space "
                    f"stays taken; remove it by hand",
                    RuntimeWarning,
                    stacklevel=2,
                )


def _clear(path: Path, final: Path, *, replaced: bool) -> None:
    if replaced and not final.exists():
        path.rename(final)  # whole, and the one to take its place never came
    else:
        shutil.rmtree(path)
