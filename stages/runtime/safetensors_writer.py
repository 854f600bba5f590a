"""One safetensors file, its header first and its tensors in any order.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from stages.artifacts.graph import BYTES_PER_ELEMENT, Parameter, element_count, evaluate_size
from stages.runtime.tiers.memoryviews import as_bytes

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
class Entry:
    """One tensor of a file. `size_bytes` is of its elements, contiguous."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    aliases: tuple[str, ...]


class SyncedWriter:
    """Writes to an unbuffered file, and keeps little of it in the page cache."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._pending_bytes = 0

    def write(self, view: memoryview, offset: int) -> None:
        """Writes `view` at byte `offset` of the file."""
        done = 0
        while done < view.nbytes:
            part = view[done : done + _SYNC_BYTES]
            written = os.pwritev(self._file.fileno(), [part], offset + done)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done += written
            self._pending_bytes += written
            if self._pending_bytes >= _SYNC_BYTES:
                self.finish()

    def finish(self) -> None:
        """All that was written is on the device afterwards."""
        os.fsync(self._file.fileno())  # only clean pages can be dropped
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._pending_bytes = 0


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes go."""

    entry: Entry
    writer: SyncedWriter
    offset: int

    def put(self, tensor: torch.Tensor) -> None:
        """Writes the tensor's elements, copying them first if they are not contiguous.

        Raises:
            ValueError: It has another shape or dtype than the header says.
            OSError: The device failed or is full.
        """
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (self.entry.shape, self.entry.dtype):
            raise ValueError(f"{self.entry.name} is {found}; expected {(self.entry.shape, self.entry.dtype)}")
        self.writer.write(as_bytes(tensor.detach().contiguous()), self.offset)


def entry_of(parameter: Parameter, dtype: str) -> Entry:
    """The parameter as a file holds it.

    Raises:
        ValueError: The format has no such dtype.
    """
    spec = parameter.spec
    check_dtype(parameter.name, dtype)
    return Entry(
        name=parameter.name,
        dtype=dtype,
        shape=tuple(evaluate_size(size, {}) for size in spec.shape),
        size_bytes=element_count(spec, {}) * BYTES_PER_ELEMENT[dtype],
        aliases=tuple(name for name in parameter.names if name != parameter.name),
    )


def check_dtype(name: str, dtype: str) -> None:
    """Raises:
    ValueError: The format has no such dtype.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is {dtype}; safetensors files hold {', '.join(_DTYPES)}")


def format_dtype(dtype: str) -> str:
    """The format's own name of a dtype: "F32" for float32."""
    return _DTYPES[dtype]


def lay_out(writer: SyncedWriter, entries: Sequence[Entry]) -> dict[str, Place]:
    """Writes a file's header; gives the place of each tensor."""
    offsets = _offsets(entries)
    header = _header(entries, offsets)
    writer.write(memoryview(header), 0)
    return {entry.name: Place(entry, writer, len(header) + offsets[entry.name]) for entry in entries}


def _offsets(entries: Sequence[Entry]) -> dict[str, int]:
    """Where each tensor's data starts, after the header.

    Wide elements first: readers map the file and view it by dtype, which wants aligned data.
    """
    offsets: dict[str, int] = {}
    offset = 0
    for entry in sorted(entries, key=lambda entry: -BYTES_PER_ELEMENT[entry.dtype]):
        offsets[entry.name] = offset
        offset += entry.size_bytes
    return offsets


def _header(entries: Sequence[Entry], offsets: Mapping[str, int]) -> bytes:
    aliases = {alias: entry.name for entry in entries for alias in entry.aliases}
    content: dict[str, object] = {"__metadata__": {"format": "pt", **aliases}}
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


def sync_folder(folder: Path) -> None:
    """Names in the folder survive a power failure afterwards."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
