"""Writes a checkpoint: a folder of safetensors files and a manifest, whole or absent.

Tensors stream from their tiers a piece at a time. The folder has another name until all is on the
disk; then it is renamed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import msgspec

from stages.artifacts import envelope
from stages.artifacts.checkpoint import Checkpoint, StoredTensor, seal
from stages.artifacts.errors import StorageError
from stages.runtime.checkpoint.leftovers import held
from stages.runtime.homes import HeldTensor, Homes
from stages.runtime.safetensors_writer import Entry, Place, SyncedWriter, check_dtype, lay_out, sync_folder

MANIFEST = "checkpoint.json"
#: bytes of one file at most, unless a single tensor is larger
SHARD_BYTES = 5 * 10**9


def save(folder: Path, homes: Homes, record: Checkpoint, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes the training state to `folder`, in place of one that exists.

    Args:
        record: The manifest; its tensors and peak are filled in here.

    Raises:
        StorageError: The folder cannot be written or is full. Nothing is left behind then.
    """
    part, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part.mkdir(mode=0o700)
        with ExitStack() as stack:
            stack.enter_context(held(part))
            _write(part, homes, record, shard_bytes)
            if folder.exists():
                stack.enter_context(held(folder))
                folder.rename(old)
            part.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise StorageError(
            f"cannot write the training state to {folder}: {error.strerror or error}. Free space there or "
            f"give another folder",
            key="checkpoint.dir",
            found=str(error),
            expected="a writable folder with enough space",
        ) from error
    finally:
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)  # the first is renamed if all went well


def size_bytes(homes: Homes) -> int:
    """What a checkpoint takes on disk, but for headers."""
    return sum(tensor.size_bytes for tensor in homes.tensors)


def _write(part: Path, homes: Homes, record: Checkpoint, shard_bytes: int) -> None:
    stored: list[StoredTensor] = []
    for number, shard in enumerate(_cut(homes.tensors, shard_bytes), start=1):
        name = f"state-{number:05d}.safetensors"
        with ExitStack() as stack:
            writer = SyncedWriter(stack.enter_context(_create(part / name)))
            places = lay_out(writer, [_entry(tensor) for tensor in shard])
            for tensor in shard:
                digest = _stream(homes, tensor, places[tensor.name])
                stored.append(StoredTensor(tensor.name, name, tensor.dtype, tensor.elements, digest))
            writer.finish()
    peak = max(record.progress.peak_bytes, homes.device.peak_bytes())
    progress = msgspec.structs.replace(record.progress, peak_bytes=peak)
    complete = msgspec.structs.replace(record, tensors=stored, progress=progress)
    envelope.write_atomically(part / MANIFEST, envelope.encode(seal(complete)))
    sync_folder(part)


def _cut(tensors: Sequence[HeldTensor], shard_bytes: int) -> list[list[HeldTensor]]:
    shards: list[list[HeldTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.size_bytes
    return shards


def _entry(tensor: HeldTensor) -> Entry:
    check_dtype(tensor.name, tensor.dtype)
    return Entry(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes, ())


def _create(path: Path) -> FileIO:
    """A new file that only its owner can read."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")


def _stream(homes: Homes, tensor: HeldTensor, place: Place) -> str:
    digest = hashlib.sha256()
    done = 0
    for piece in homes.read(tensor):
        place.writer.write(piece, place.offset + done)
        digest.update(piece)
        done += piece.nbytes
    return digest.hexdigest()
