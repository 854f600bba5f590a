"""Reads a checkpoint into the tiers of any plan of the same model."""

from __future__ import annotations

import hashlib
import os
import re
from io import FileIO
from pathlib import Path

from stages.artifacts import envelope
from stages.artifacts.checkpoint import Checkpoint, StoredTensor
from stages.artifacts.errors import ArtifactError, ConfigError
from stages.region.safetensors_reader import Entry, read_header
from stages.runtime.checkpoint.write import MANIFEST
from stages.runtime.homes import HeldTensor, Homes
from stages.runtime.safetensors_writer import format_dtype

_STEP_FOLDER = re.compile(r"step-([0-9]+)")


def find(folder: Path) -> Path:
    """The checkpoint that `folder` is, or the newest whole one in it.

    Raises:
        ConfigError: There is none.
    """
    if (folder / MANIFEST).is_file():
        return folder
    numbered = [
        (int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _STEP_FOLDER.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    if not numbered:
        raise ConfigError(
            f"resume={folder} holds no checkpoint; expected a folder with {MANIFEST}, or one with folders "
            f"step-N that have it",
            key="resume",
            found=str(folder),
            expected=f"a folder with {MANIFEST}",
        )
    return max(numbered)[1]


def load_manifest(folder: Path) -> Checkpoint:
    """Raises:
    ArtifactError: It is missing, damaged or altered.
    """
    manifest = envelope.load(folder / MANIFEST, Checkpoint)
    for tensor in manifest.tensors:
        if Path(tensor.file).name != tensor.file:
            raise ArtifactError(
                f"{folder / MANIFEST} names the file {tensor.file!r}; expected a plain name in its folder",
                key="resume",
            )
    return manifest


def restore(folder: Path, manifest: Checkpoint, homes: Homes) -> None:
    """Fills all tensors of `homes`, a piece at a time, and holds each against its checksum.

    Raises:
        ArtifactError: The checkpoint is of another model, precision or optimizer, or is damaged. The
            training state cannot be used then.
    """
    held = {tensor.name: tensor for tensor in homes.tensors}
    _check_names(folder, manifest, held)
    for file in dict.fromkeys(tensor.file for tensor in manifest.tensors):
        stored = [tensor for tensor in manifest.tensors if tensor.file == file]
        _restore_file(folder / file, stored, held, homes)


def _check_names(folder: Path, manifest: Checkpoint, held: dict[str, HeldTensor]) -> None:
    stored = {tensor.name: (tensor.dtype, tensor.elements) for tensor in manifest.tensors}
    wanted = {name: (tensor.dtype, tensor.elements) for name, tensor in held.items()}
    differing = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise ArtifactError(
            f"{folder} does not fit this job: {name} is {stored.get(name, 'missing')} there and "
            f"{wanted.get(name, 'unknown')} here ({len(differing)} tensors differ). Resume with the model, "
            f"precision and optimizer that wrote it",
            key="resume",
            found=str(stored.get(name, "missing")),
            expected=str(wanted.get(name, "nothing of that name")),
        )


def _restore_file(path: Path, stored: list[StoredTensor], held: dict[str, HeldTensor], homes: Homes) -> None:
    entries, start = read_header(path)
    try:
        with path.open("rb", buffering=0) as file:
            for tensor in stored:
                entry = _checked_entry(path, entries, tensor, held[tensor.name])
                source = _Source(file, path, start + entry.data_offsets[0])
                homes.fill(held[tensor.name], source.take)
                if source.digest.hexdigest() != tensor.sha256:
                    raise _damaged(path, tensor.name, "its checksum differs")
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}", key="resume") from error


def _checked_entry(path: Path, entries: dict[str, Entry], stored: StoredTensor, held: HeldTensor) -> Entry:
    entry = entries.get(stored.name)
    if entry is None:
        raise _damaged(path, stored.name, "it is missing")
    first, last = entry.data_offsets
    if first < 0 or last - first != held.size_bytes or entry.dtype != format_dtype(stored.dtype):
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
