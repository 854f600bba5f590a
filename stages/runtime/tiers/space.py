"""A scratch file's name, its space, and the errors of both."""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from pathlib import Path

from stages.artifacts.errors import StorageError

#: filesystems whose files are memory: what is written there stays in RAM
_MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_nameless(folder: Path) -> tuple[int, bool]:
    """Makes a file in `folder` and takes its name away at once.

    Nobody else can open it then, and its space is free again when this process ends, however it ends.

    Returns:
        A descriptor, and whether it passes the page cache by (O_DIRECT). Where it does not, warns.

    Raises:
        StorageError: The folder is missing, is a file, or is not writable.
    """
    path = folder / f"tier-{secrets.token_hex(8)}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor, direct = _open_directly(path, flags)
        path.unlink()
    except OSError as error:
        raise unusable(folder, error) from error
    if not direct:
        warn_of_page_cache(folder)
    elif filesystem_type(folder) in _MEMORY_FILESYSTEMS:
        warnings.warn(
            f"{folder} is in memory ({filesystem_type(folder)}): what the plan moves to the disk tier stays "
            f"in RAM, outside the budget. Give a folder on a disk as tiers.disk",
            RuntimeWarning,
            stacklevel=2,
        )
    return descriptor, direct


def _open_directly(path: Path, flags: int) -> tuple[int, bool]:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # the file may have been made before the flag was refused
    return os.open(path, flags, 0o600), False


def reopen_buffered(descriptor: int) -> int:
    """The same file without O_DIRECT; closes `descriptor`."""
    buffered = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    os.close(descriptor)
    return buffered


def warn_of_page_cache(folder: Path) -> None:
    warnings.warn(
        f"the filesystem of {folder} has no direct I/O: transfers go through the page cache, are slower, "
        f"and count against a memory limit until the cache is dropped after each. "
        f"Give a folder on a local disk as tiers.disk to avoid this",
        RuntimeWarning,
        stacklevel=3,
    )


def filesystem_type(folder: Path) -> str:
    """ "ext4", "tmpfs", ...; "" where /proc/self/mountinfo does not list the folder's device.

    Overlays and some network filesystems give files a device number that no mount has.
    """
    device = folder.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, details = line.partition(" - ")
        if mount.split()[2] == wanted:
            return details.split()[0]
    return ""


def reserve(descriptor: int, folder: Path, size_bytes: int) -> None:
    """Makes the file `size_bytes` long with all its blocks allocated, so that no write can run out.

    Raises:
        StorageError: Too little space is free.
    """
    if size_bytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno in _FULL:
            raise too_small(folder, size_bytes) from error
        raise failed(folder, "reserve", 0, size_bytes, error) from error


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """Refuses a folder that has too little space, before anything is written there.

    Raises:
        StorageError: Fewer than `needed_bytes` are free for this user, or the folder is unreadable.
    """
    try:
        free = free_bytes(folder)
    except OSError as error:
        raise unusable(folder, error) from error
    if free < needed_bytes:
        raise too_small(folder, needed_bytes)


def free_bytes(folder: Path) -> int:
    """What this user may still write there."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def unusable(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot use {folder} for scratch files: {error.strerror or error}. "
        f"Give a writable folder as tiers.disk",
        key="tiers.disk",
        found=str(folder),
        expected="a writable folder",
    )


def too_small(folder: Path, needed_bytes: int) -> StorageError:
    free = free_bytes(folder)
    return StorageError(
        f"the disk tier needs {needed_bytes} bytes in {folder}, where {free} bytes are free. "
        f"Free space there, give a folder on another filesystem as tiers.disk, or raise the budget",
        key="tiers.disk",
        found=f"{free} bytes free",
        expected=f"{needed_bytes} bytes",
    )


def failed(folder: Path, verb: str, offset: int, size_bytes: int, error: OSError) -> StorageError:
    """The error of a system call on the scratch file. verb: "read", "write" or "reserve"."""
    if error.errno in _FULL:
        advice = "Free space on that filesystem, or give a folder on another as tiers.disk"
    else:
        advice = "Check the device's log, or give a folder on another as tiers.disk"
    return StorageError(
        f"could not {verb} {size_bytes} bytes at byte {offset} of the scratch file in {folder}: "
        f"{error.strerror or error}. {advice}",
        key="tiers.disk",
        found=errno.errorcode.get(error.errno or 0, str(error)),
        expected=f"to {verb} {size_bytes} bytes",
    )


def short(folder: Path, verb: str, offset: int, size_bytes: int) -> StorageError:
    """The error of a call that moved nothing: the file ends there, or the device takes no more."""
    return StorageError(
        f"the scratch file in {folder} would not {verb} the remaining {size_bytes} bytes at byte {offset}: "
        f"it was cut short or its device is full. Free space there and run again",
        key="tiers.disk",
        found="0 bytes",
        expected=f"to {verb} {size_bytes} bytes",
    )
