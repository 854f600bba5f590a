"""Reads a checkpoint into the tiers of any plan of the same model."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from io import FileIO
from pathlib import Path

import torch

from stages.artifacts import envelope
from stages.artifacts.checkpoint import Checkpoint, StoredTensor
from stages.artifacts.errors import ArtifactError, ConfigError
from stages.artifacts.graph import BYTES_PER_ELEMENT
from stages.region import operators
from stages.region.safetensors_reader import Entry, read_header
from stages.runtime.checkpoint.leftovers import clear_away
from stages.runtime.checkpoint.write import MANIFEST
from stages.runtime.homes import HeldTensor, Homes
from stages.runtime.safetensors_writer import format_dtype
from stages.runtime.tiers.memoryviews import as_bytes

_STEP_FOLDER = re.compile(r"step-([0-9]+)")


def candidates(folder: Path) -> list[Path]:
    """The checkpoint that `folder` is, or those in it, newest first; none is known to be whole yet.

    Raises:
        ConfigError: There is none.
    """
    if (folder / MANIFEST).is_file():
        return [folder]
    clear_away(folder)
    numbered = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _STEP_FOLDER.fullmatch(path.name)) and path.is_dir()
    ]
    if not numbered:
        raise ConfigError(
            f"resume={folder} holds no checkpoint; expected a folder with {MANIFEST}, or one with folders "
            f"step-N that have it",
            key="resume",
            found=str(folder),
            expected=f"a folder with {MANIFEST}",
        )
    return [path for _, path in sorted(numbered, reverse=True)]


def load_manifest(folder: Path) -> Checkpoint:
    """Raises:
    ArtifactError: It is missing, damaged or altered.
    """
    manifest = envelope.load(folder / MANIFEST, Checkpoint)
    for tensor in manifest.tensors:
        if Path(tensor.file).name != tensor.file or tensor.file in ("", ".."):
            raise ArtifactError(
                f"{folder / MANIFEST} names the file {tensor.file!r}; expected a plain name in its folder",
                key="resume",
            )
    return manifest


def restore(folder: Path, manifest: Checkpoint, homes: Homes, precision: str = "") -> None:
    """Fills all tensors of `homes`, a piece at a time, and holds each against its checksum.

    Args:
        precision: Of the job; "": the checkpoint's. Under another one, weights and fp32 masters are made
            from the checkpoint's masters, or from its weights where it has none.

    Raises:
        ArtifactError: The checkpoint is of another model or optimizer, or is damaged. The training state
            cannot be used then.
    """
    sources = _sources(folder, manifest, homes, changes=precision not in ("", manifest.precision))
    for file in dict.fromkeys(tensor.file for tensor, _ in sources):
        _restore_file(folder / file, [pair for pair in sources if pair[0].file == file], homes)


def _sources(
    folder: Path, manifest: Checkpoint, homes: Homes, *, changes: bool
) -> list[tuple[StoredTensor, HeldTensor]]:
    """What each tensor of the job is filled from.

    Args:
        changes: Whether the job has another precision.

    Raises:
        ArtifactError: The two do not fit.
    """
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    pairs = [
        (stored.get(_origin(tensor.name, stored) if changes else tensor.name), tensor)
        for tensor in homes.tensors
    ]
    used = {source.name for source, _ in pairs if source is not None}
    for source, tensor in pairs:
        if source is None or not _fits(source, tensor, may_be_cast=changes):
            found = "missing" if source is None else f"{source.elements} elements of {source.dtype}"
            raise _unfit(folder, tensor.name, found, f"{tensor.elements} of {tensor.dtype}")
    rounded = {name for name in stored if changes and name.startswith("weight/")}  # their masters are used
    for name in stored.keys() - used - rounded:
        raise _unfit(folder, name, "there", "unknown")
    return [(source, tensor) for source, tensor in pairs if source is not None]


def _origin(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """Under another precision: the stored tensor that has the values of `name` in full."""
    role, _, owner = name.partition("/")
    if role not in ("weight", "master"):
        return name
    master = f"master/{owner}"
    return master if master in stored else f"weight/{owner}"


def _fits(source: StoredTensor, tensor: HeldTensor, *, may_be_cast: bool) -> bool:
    castable = may_be_cast and tensor.name.startswith(("weight/", "master/"))
    return source.elements == tensor.elements and (castable or source.dtype == tensor.dtype)


def _unfit(folder: Path, name: str, found: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"{folder} does not fit this job: {name} is {found} there and {expected} here. Resume with the model "
        f"and optimizer that wrote it",
        key="resume",
        found=found,
        expected=expected,
    )


def _restore_file(path: Path, pairs: list[tuple[StoredTensor, HeldTensor]], homes: Homes) -> None:
    if path.is_symlink():  # as with names that lead out of the folder
        raise ArtifactError(
            f"{path} is a symbolic link; expected a file in the checkpoint's own folder", key="resume"
        )
    entries, start = read_header(path)
    try:
        with path.open("rb", buffering=0) as file:
            for stored, tensor in pairs:
                entry = _checked_entry(path, entries, stored)
                source = _Source(file, path, start + entry.data_offsets[0])
                take = (
                    source.take
                    if stored.dtype == tensor.dtype
                    else source.casting(stored.dtype, tensor.dtype)
                )
                homes.fill(tensor, take)
                if source.digest.hexdigest() != stored.sha256:
                    raise _damaged(path, stored.name, "its checksum differs")
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}", key="resume") from error


def _checked_entry(path: Path, entries: dict[str, Entry], stored: StoredTensor) -> Entry:
    entry = entries.get(stored.name)
    if entry is None:
        raise _damaged(path, stored.name, "it is missing")
    first, last = entry.data_offsets
    size = stored.elements * BYTES_PER_ELEMENT[stored.dtype]
    if first < 0 or last - first != size or entry.dtype != format_dtype(stored.dtype):
        raise _damaged(path, stored.name, f"it is {entry.dtype}, bytes {first} to {last}")
    return entry


def _damaged(path: Path, name: str, why: str) -> ArtifactError:
    return ArtifactError(
        f"{path}: {name} is damaged: {why}. Use another checkpoint", key="resume", found=why, expected=name
    )


class _Source:
    """Consecutive bytes of a file, hashed as they are read and then dropped from the page cache."""

    def __init__(self, file: FileIO, path: Path, offset: int) -> None:
        self._file, self._path, self._offset = file, path, offset
        self.digest = hashlib.sha256()

    def take(self, piece: memoryview) -> None:
        done = 0
        while done < piece.nbytes:
            count = os.preadv(self._file.fileno(), [piece[done:]], self._offset + done)
            if count == 0:
                raise _damaged(self._path, "the file", f"it ends after {self._offset + done} bytes")
            done += count
        self._offset += done
        # cached pages would count against a memory limit
        os.posix_fadvise(self._file.fileno(), self._offset - done, done, os.POSIX_FADV_DONTNEED)
        self.digest.update(piece)

    def casting(self, stored: str, wanted: str) -> Callable[[memoryview], None]:
        """As `take`, for pieces of another dtype than the file's."""
        source_dtype, wanted_dtype = operators.dtype(stored), operators.dtype(wanted)

        def take(piece: memoryview) -> None:
            target = torch.frombuffer(piece, dtype=wanted_dtype)
            content = torch.empty(target.numel(), dtype=source_dtype)
            self.take(as_bytes(content))
            target.copy_(content)

        return take
