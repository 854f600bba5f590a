"""Weights out of the tiers into safetensors files, one tensor in memory at a time.

Format: https://github.com/huggingface/safetensors#format. Layout of names, shards and index as
Hugging Face's `save_pretrained` makes them, so that `from_pretrained` reads the folder.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from stages.artifacts.envelope import write_atomically
from stages.artifacts.errors import StorageError
from stages.artifacts.graph import BYTES_PER_ELEMENT, Parameter, element_count, evaluate_size
from stages.runtime.tiers.memoryviews import as_bytes

#: bytes of one file at most, unless a single tensor is larger; as Hugging Face's default
SHARD_BYTES = 5 * 10**9
#: bytes after which what was written is synced and dropped from the page cache, which would
#: otherwise count against a memory limit
_SYNC_BYTES = 64 * 2**20
#: the format wants the header to end on such a border
_HEADER_ALIGNMENT = 8

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip


@dataclass(frozen=True)
class _Entry:
    """One tensor of a file. `size_bytes` is of its elements, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    aliases: tuple[str, ...]


def export_weights(
    folder: Path,
    weights: Iterable[tuple[Parameter, torch.Tensor]],
    export_config: str | None,
    *,
    parameters: Sequence[Parameter],
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the model's state dict to `folder` as safetensors, and its configuration if it has one.

    A tensor that goes by several names is written once, under its first; the others are in the
    file's metadata as safetensors' own `save_model` puts them, so that a strict load into the model
    finds them. Constants, and buffers that are not persistent, are not in a state dict.

    Args:
        folder: Made if missing. Files of the same names are replaced, each as a whole.
        weights: Parameters and buffers with their values, in the order of `parameters`, each of the
            dtype of its spec unless it is the fp32 master. May hold more than is written. Only one
            tensor is in memory at a time if the iterable makes them so.
        export_config: Content of config.json, or None.
        parameters: Those of the graph: the header is written before the first tensor.

    Returns:
        The files written.

    Raises:
        StorageError: The folder cannot be written or is full. No file under its final name is partial.
        ValueError: The values do not follow the order, shapes or dtypes of `parameters`.
    """
    wanted = [parameter for parameter in parameters if _in_state_dict(parameter)]
    names = {parameter.name for parameter in wanted}
    source = ((parameter.name, tensor) for parameter, tensor in weights if parameter.name in names)
    shards = _cut([_entry(parameter) for parameter in wanted], shard_bytes)
    files = [folder / name for name in _file_names(len(shards))]
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, shard in zip(files, shards, strict=True):
            _write_file(file, shard, source)
        _remove_others(folder, files)
        if len(shards) > 1:
            files.append(_write_index(folder, files, shards))
        if export_config is not None:
            config = folder / "config.json"
            write_atomically(config, export_config.encode())
            files.append(config)
    return files


def _in_state_dict(parameter: Parameter) -> bool:
    return parameter.role == "parameter" or (parameter.role == "buffer" and parameter.persistent)


def _entry(parameter: Parameter) -> _Entry:
    spec = parameter.spec
    if spec.dtype not in _DTYPES:
        raise ValueError(f"{parameter.name} is {spec.dtype}; safetensors files hold {', '.join(_DTYPES)}")
    return _Entry(
        name=parameter.name,
        dtype=spec.dtype,
        shape=tuple(evaluate_size(size, {}) for size in spec.shape),
        size_bytes=element_count(spec, {}) * BYTES_PER_ELEMENT[spec.dtype],
        aliases=tuple(name for name in parameter.names if name != parameter.name),
    )


def _cut(entries: list[_Entry], shard_bytes: int) -> list[list[_Entry]]:
    """Consecutive entries of at most `shard_bytes` together; a larger one is alone."""
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size_bytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _offsets(entries: Sequence[_Entry]) -> dict[str, int]:
    """Where each tensor's data starts, after the header.

    Wide elements first: readers map the file and view it by dtype, which wants aligned data.
    """
    offsets: dict[str, int] = {}
    offset = 0
    for entry in sorted(entries, key=lambda entry: -BYTES_PER_ELEMENT[entry.dtype]):
        offsets[entry.name] = offset
        offset += entry.size_bytes
    return offsets


def _header(entries: Sequence[_Entry], offsets: Mapping[str, int]) -> bytes:
    content: dict[str, object] = {
        "__metadata__": {"format": "pt", **{alias: entry.name for entry in entries for alias in entry.aliases}}
    }
    for entry in entries:
        start = offsets[entry.name]
        content[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [start, start + entry.size_bytes],
        }
    encoded = json.dumps(content, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def _write_file(path: Path, entries: Sequence[_Entry], source: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes one file under a temporary name, syncs it, and renames it into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb", buffering=0) as file:
            writer = _SyncedWriter(file)
            offsets = _offsets(entries)
            header = _header(entries, offsets)
            writer.write(memoryview(header))
            for entry in entries:
                name, tensor = next(source, ("nothing", torch.empty(0)))
                _check(entry, name, tensor)
                file.seek(len(header) + offsets[entry.name])
                writer.write(as_bytes(tensor.detach().contiguous()))
                del tensor  # before the source makes the next
            writer.finish()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check(entry: _Entry, name: str, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    found = (name, tuple(tensor.shape), dtype)
    expected = (entry.name, entry.shape, entry.dtype)
    if found != expected:
        raise ValueError(f"got {found} where {expected} comes next in the file")


class _SyncedWriter:
    """Writes to an unbuffered file, and keeps little of it in the page cache."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._pending_bytes = 0

    def write(self, view: memoryview) -> None:
        for start in range(0, view.nbytes, _SYNC_BYTES):
            part = view[start : start + _SYNC_BYTES]
            done = 0
            while done < part.nbytes:
                written = self._file.write(part[done:])
                if not written:
                    raise OSError(28, "the device takes no more")
                done += written
            self._pending_bytes += part.nbytes
            if self._pending_bytes >= _SYNC_BYTES:
                self.finish()

    def finish(self) -> None:
        os.fsync(self._file.fileno())  # only clean pages can be dropped
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._pending_bytes = 0


def _write_index(folder: Path, files: Sequence[Path], shards: Sequence[Sequence[_Entry]]) -> Path:
    index = {
        "metadata": {"total_size": sum(entry.size_bytes for shard in shards for entry in shard)},
        "weight_map": {
            entry.name: file.name for file, shard in zip(files, shards, strict=True) for entry in shard
        },
    }
    path = folder / "model.safetensors.index.json"
    write_atomically(path, json.dumps(index, indent=2).encode())
    return path


def _remove_others(folder: Path, files: Sequence[Path]) -> None:
    """Removes what an earlier export with other shards left: readers would take a stale index first."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    for old in [*folder.glob("model-*-of-*.safetensors"), folder / "model.safetensors"]:
        if old not in files:
            old.unlink(missing_ok=True)


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write the exported weights to {folder}: {error.strerror or error}. "
            f"Free space there or give another folder",
            key="export",
            found=str(error),
            expected="a writable folder with enough space",
        ) from error
