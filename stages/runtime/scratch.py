"""The folder for what a run keeps on disk: private, and gone when the run is, however it ends."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import secrets
import shutil
import warnings
from pathlib import Path
from types import TracebackType

from stages.artifacts.errors import StorageError

_LOCK_SUFFIX = ".lock"
#: what this module makes, and so all that it may remove from a folder that may hold the user's own files
_NAME = re.compile(r"stages-scratch-[0-9]+-[0-9a-f]{8}")


class ScratchFolder:
    """A folder of mode 0700 that only this process uses; a context manager that gives its path.

    While the process lives it holds a lock on a file beside the folder. A folder whose lock nobody
    holds was left by a process that was killed, and is removed by the next one to start. The kernel
    drops the lock of a dead process, so neither a reused process id nor another container that
    shares the disk is mistaken for it.

    SIGTERM should be turned into an exception by the program (`stages.process` does); nothing is
    left behind then. A process that is killed outright leaves an empty folder at most: the data is in
    a file without a name, see `tiers.space.open_nameless`.

    Args:
        root: Where to make it: `TiersConfig.folder`.

    Raises:
        StorageError: `root` is a file or not writable.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_stale(self._root)
            self._lock, self.path = _make(self._root)
        except OSError as error:
            raise StorageError(
                f"cannot make a scratch folder in {self._root}: {error.strerror or error}. "
                f"Give a writable folder as tiers.disk",
                key="tiers.disk",
                found=f"{self._root}: {error.strerror or error}",
                expected="a writable folder",
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Removes the folder and all that is in it. Safe to call twice."""
        if self._lock < 0:
            return
        _remove(self.path)
        os.close(self._lock)
        self._lock = -1
        atexit.unregister(self.close)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale(root: Path) -> list[Path]:
    """Removes the scratch folders of processes that are no more.

    What belongs to somebody else, or cannot be removed, is left with a warning.

    Returns:
        The folders removed.
    """
    removed = []
    for lock in sorted(root.glob(f"*{_LOCK_SUFFIX}")):
        path = lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX))
        if _NAME.fullmatch(path.name) and _remove_if_stale(path):
            removed.append(path)
    return removed


def _make(root: Path) -> tuple[int, Path]:
    """Takes a lock, then makes its folder: no folder is ever seen without the lock of a living process."""
    while True:
        path = root / f"stages-scratch-{os.getpid()}-{secrets.token_hex(4)}"
        lock_path = _lock_of(path)
        lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink == 0:  # another process took the file for stale before we locked it
                os.close(lock)
                continue
            path.mkdir(mode=0o700)
        except BlockingIOError:  # another process is about to take the file for stale
            os.close(lock)
            continue
        except OSError:
            lock_path.unlink(missing_ok=True)
            os.close(lock)
            raise
        return lock, path


def _remove_if_stale(path: Path) -> bool:
    try:
        lock = os.open(_lock_of(path), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False  # another process removed it at the same time
    except OSError as error:
        _warn(path, error)
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _remove(path)
    except BlockingIOError:
        return False  # its process lives
    except OSError as error:
        _warn(path, error)
        return False
    finally:
        os.close(lock)


def _remove(path: Path) -> bool:
    """Removes a folder, then its lock file; returns whether there was a folder."""
    existed = True
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        existed = False
    _lock_of(path).unlink(missing_ok=True)
    return existed


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _LOCK_SUFFIX)


def _warn(path: Path, error: OSError) -> None:
    warnings.warn(
        f"cannot remove {path}, which a killed run left: {error.strerror or error}. Its space stays taken; "
        f"remove it by hand",
        RuntimeWarning,
        stacklevel=4,
    )
