"""The store: a folder of artifacts under keys that say what each was made from.

A key is a hash of everything that could change the artifact. An artifact is written under a
temporary name and renamed, so a reader sees it whole or not at all, and two runs that make the same
artifact at once both write the same content.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stages.artifacts.errors import StorageError


def default_folder() -> Path:
    """The user's cache folder by the platform's convention, with a folder of ours in it."""
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        # XDG Base Directory Specification: a relative path is to be ignored
        named = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "stages"


def key_of(parts: Mapping[str, Any]) -> str:
    """A short hash of `parts` (JSON values), the same whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:24]


def hash_files(files: Iterable[Path]) -> str:
    """A hash of the files' names and content, in the order of their paths.

    Raises:
        StorageError: A file cannot be read.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise StorageError(f"{file} cannot be read: {error}; it is part of a key of the store") from error
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def describe_files(folder: Path) -> list[list[Any]]:
    """Path, size and modification time (ns) of every file in `folder`: weights, too large to hash."""
    described: list[list[Any]] = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        status = file.stat()
        described.append([str(file.relative_to(folder)), status.st_size, status.st_mtime_ns])
    return described


def machine() -> dict[str, Any]:
    """What measured costs depend on: processor, its number of cores for this process, threads asked for."""
    model = ""
    information = Path("/proc/cpuinfo")
    if information.exists():
        lines = information.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = {name: os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return {"node": platform.node(), "machine": platform.machine(), "model": model, "cores": cores, **threads}


class Store:
    """A folder with one folder per key, which holds the artifacts of one run of one stage."""

    def __init__(self, folder: Path | None = None) -> None:
        """Args: folder: where it lies; None or an empty path: the user's cache folder.

        Raises:
            StorageError: The folder cannot be made or written.
        """
        self.folder = (folder or default_folder() / "store").absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"the store {self.folder} cannot be made: {error}; give another with store=DIR",
                key="store",
                found=str(self.folder),
                expected="a folder that can be written",
            ) from error

    def path(self, stage: str, key: str, kind: str) -> Path:
        """Where the artifact of `kind` that `stage` makes under `key` lies, or would lie."""
        return self.folder / stage / key / f"{kind}.json"

    def holds(self, stage: str, key: str, kinds: Iterable[str]) -> bool:
        return all(self.path(stage, key, kind).is_file() for kind in kinds)
