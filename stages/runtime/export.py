"""Weights out of the tiers into safetensors files, one tensor in memory at a time.

Format: https://github.com/huggingface/safetensors#format. Layout of names, shards and index as
Hugging Face's `save_pretrained` makes them, so that `from_pretrained` reads the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from stages.artifacts.envelope import write_atomically
from stages.artifacts.errors import StorageError
from stages.artifacts.graph import Parameter, RegionGraph
from stages.region.initial import iterate_initial
from stages.runtime.safetensors_writer import Entry, Place, SyncedWriter, entry_of, lay_out, sync_folder

#: bytes of one file at most, unless a single tensor is larger; as Hugging Face's default
SHARD_BYTES = 5 * 10**9
_PART = re.compile(r"\.model.*\.safetensors\.[0-9]+\.part")


def export_weights(
    folder: Path,
    graph: RegionGraph,
    weights: Iterable[tuple[Parameter, torch.Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the model's state dict to `folder` as safetensors, and its configuration if it has one.

    A tensor that goes by several names is written once, under its first; the others are in the
    file's metadata as safetensors' own `save_model` puts them, so that a strict load into the model
    finds them. Constants, and buffers that are not persistent, are not in a state dict.

    Args:
        folder: Made if missing. Files of the same names are replaced, each as a whole.
        weights: Every parameter and buffer with its value in the dtype of its spec, in any order. May
            hold more than is written. Only one tensor is in memory at a time if the iterable makes
            them so.
        shard_bytes: Bytes of one file at most, unless a single tensor is larger.

    Returns:
        The files written.

    Raises:
        StorageError: The folder cannot be written or is full. No file under its final name is partial.
        ValueError: A value is missing, comes twice, or has another shape or dtype than in the graph.
    """
    entries = [entry_of(parameter, parameter.spec.dtype) for parameter in _state_dict(graph)]
    return _export(folder, entries, _by_name(weights), graph.export_config, shard_bytes)


def export_initial(
    folder: Path, graph: RegionGraph, seed: int, *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes the initial values as `export_weights` does, in the dtypes before the precision's cast.

    Raises:
        StorageError: As for `export_weights`.
        ArtifactError: The graph holds no record of the initial values, or a damaged one.
    """
    entries = [entry_of(parameter, parameter.initial_dtype) for parameter in _state_dict(graph)]
    return _export(folder, entries, iterate_initial(graph, seed), graph.export_config, shard_bytes)


def _export(
    folder: Path,
    entries: list[Entry],
    values: Iterable[tuple[str, torch.Tensor]],
    export_config: str | None,
    shard_bytes: int,
) -> list[Path]:
    shards = _cut(entries, shard_bytes)
    files = [folder / name for name in _file_names(len(shards))]
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_parts(folder)
        made = [*files]
        with _written(dict(zip(files, shards, strict=True)), values) as parts:
            if export_config is not None:
                config = folder / "config.json"
                write_atomically(config, export_config.encode())
                made.append(config)
            # Readers start at the index or at model.safetensors. What one of several files replaces goes
            # before they come and the index comes after them: at no moment is a mixture of two exports read.
            _remove_others(folder, files)
            for path, part in parts.items():
                part.replace(path)
            if len(shards) > 1:
                made.insert(len(files), _write_index(folder, files, shards))
        sync_folder(folder)
    return made


def _by_name(weights: Iterable[tuple[Parameter, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for parameter, tensor in weights:
        yield parameter.name, tensor
        del tensor  # before the source makes the next


def _state_dict(graph: RegionGraph) -> list[Parameter]:
    return [
        parameter
        for parameter in graph.parameters
        if parameter.role == "parameter" or (parameter.role == "buffer" and parameter.persistent)
    ]


def _cut(entries: list[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Consecutive entries of at most `shard_bytes` together; a larger one is alone."""
    shards: list[list[Entry]] = [[]]
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


def _remove_parts(folder: Path) -> None:
    """Removes temporary files of killed processes; a living one holds a lock on its own."""
    for path in folder.iterdir():
        if _PART.fullmatch(path.name):
            with path.open("rb") as file, contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


@contextmanager
def _written(
    shards: Mapping[Path, Sequence[Entry]], values: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[dict[Path, Path]]:
    """All files under temporary names, whole and synced; what is not renamed inside is removed after it."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.part") for path in shards}
    try:
        with ExitStack() as stack:
            places: dict[str, Place] = {}
            writers = []
            for path, entries in shards.items():
                file = stack.enter_context(temporary[path].open("wb", buffering=0))
                fcntl.flock(file, fcntl.LOCK_EX)
                writer = SyncedWriter(file)
                writers.append(writer)
                places.update(lay_out(writer, entries))
            _write_values(places, values)
            for writer in writers:
                writer.finish()
            yield temporary
    finally:
        for part in temporary.values():
            part.unlink(missing_ok=True)


def _write_values(places: dict[str, Place], values: Iterable[tuple[str, torch.Tensor]]) -> None:
    known = set(places)
    for name, tensor in values:
        place = places.pop(name, None)
        if place is not None:
            place.put(tensor)
        elif name in known:
            raise ValueError(f"{name} comes twice; expected each value once")
        del tensor  # before the source makes the next
    if places:
        raise ValueError(f"no value for {', '.join(sorted(places))}; expected one for each tensor")


def _write_index(folder: Path, files: Sequence[Path], shards: Sequence[Sequence[Entry]]) -> Path:
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
