"""Weights from safetensors files, one tensor in memory at a time, read without mapping the file.

A mapped file's pages count as resident memory of the process; plain reads do not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError
from stages.region import operators

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

_MAXIMUM_HEADER_BYTES = 100_000_000  # as in the format's reference implementation


class Entry(msgspec.Struct, frozen=True):
    """One tensor of a file: dtype and shape, and where its bytes lie after the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read(graph: g.RegionGraph) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value, cast to `initial_dtype`, of every parameter that the files hold.

    Raises:
        ArtifactError: A file is missing or damaged, or a tensor has another shape than the model's.
    """
    wanted: dict[str, list[g.Parameter]] = {}
    for parameter in graph.parameters:
        if parameter.name in graph.initial.keys:
            wanted.setdefault(graph.initial.keys[parameter.name], []).append(parameter)
    for name in graph.initial.files:
        if Path(name).name != name or name in ("", ".."):
            raise ArtifactError(
                f"found weights file {name!r}; expected a plain name inside the model's folder"
            )
        path = Path(graph.initial.folder) / name
        entries, start = read_header(path)
        with path.open("rb", buffering=0) as file:
            for key in sorted(set(entries) & set(wanted), key=lambda key: entries[key].data_offsets):
                for parameter in wanted.pop(key):
                    yield parameter.name, _tensor(file, path, key, entries[key], start, parameter)
    if wanted:
        raise ArtifactError(
            f"{graph.initial.folder} lacks the tensors {', '.join(sorted(wanted))}. Trace again"
        )


def read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """The tensors of a file, and the offset at which their bytes start.

    Raises:
        ArtifactError: The file is missing, or no safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MAXIMUM_HEADER_BYTES, path.stat().st_size):
                raise ArtifactError(f"{path} is no safetensors file: its header would have {length} bytes")
            table = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        entries = {
            key: msgspec.json.decode(raw, type=Entry) for key, raw in table.items() if key != "__metadata__"
        }
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read as safetensors: {error}") from error
    return entries, 8 + length


def _tensor(
    file: BinaryIO, path: Path, key: str, entry: Entry, start: int, parameter: g.Parameter
) -> torch.Tensor:
    shape = [g.evaluate_size(size, {}) for size in parameter.spec.shape]
    if entry.shape != shape:
        raise ArtifactError(
            f"{path}: {key} has the shape {entry.shape}; the model expects {shape}. "
            f"Weights and configuration must belong together",
            found=str(entry.shape),
            expected=str(shape),
        )
    dtype = _DTYPES.get(entry.dtype, "")
    first, last = entry.data_offsets
    size = prod(entry.shape) * g.BYTES_PER_ELEMENT.get(dtype, 0)
    if not dtype or last - first != size or first < 0 or start + last > os.fstat(file.fileno()).st_size:
        raise ArtifactError(
            f"{path}: {key} is damaged ({entry.dtype}, bytes {first} to {last}, expected {size})"
        )
    content = torch.empty(size, dtype=torch.uint8)
    _read_into(file, memoryview(content.numpy().data), start + first, path)
    # the pages would stay in the cache and count against a memory limit
    os.posix_fadvise(file.fileno(), start + first, size, os.POSIX_FADV_DONTNEED)
    tensor = content.view(operators.dtype(dtype)).reshape(shape) if size else content.reshape(shape)
    return tensor.to(operators.dtype(parameter.initial_dtype))


def _read_into(file: BinaryIO, target: memoryview, offset: int, path: Path) -> None:
    done = 0
    while done < len(target):
        count = os.preadv(file.fileno(), [target[done:]], offset + done)
        if count == 0:
            raise ArtifactError(f"{path} ends after {offset + done} bytes; expected {offset + len(target)}")
        done += count
