"""How an artifact lies on disk: JSON in an envelope, written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from stages.artifacts.checkpoint import Checkpoint, check_seal
from stages.artifacts.checks import check_graph
from stages.artifacts.costs import Costs
from stages.artifacts.curve import Curve
from stages.artifacts.errors import ArtifactError, StorageError
from stages.artifacts.graph import RegionGraph, Struct
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline

SCHEMA_VERSION = 1

KINDS: dict[str, type[Struct]] = {
    "graph": RegionGraph,
    "costs": Costs,
    "plan": Plan,
    "summary": Summary,
    "timeline": Timeline,
    "checkpoint": Checkpoint,
    "curve": Curve,
}

Artifact = TypeVar("Artifact", bound=Struct)


class Provenance(Struct, frozen=True):
    """Who made it: versions of what matters, the key it is stored under, and the making process's peak."""

    key: str = ""
    versions: dict[str, str] = {}
    peak_bytes: int = 0


class _Header(msgspec.Struct, frozen=True):
    """The envelope without its content; read first, so that errors name the cause."""

    kind: str
    schema_version: int
    inputs: dict[str, str]
    provenance: Provenance
    content: msgspec.Raw
    #: SHA-256 of `content`, byte by byte as written: what was altered, by whatever accident, is not used
    digest: str = ""


def kind_of(artifact: Struct) -> str:
    for kind, record in KINDS.items():
        if type(artifact) is record:
            return kind
    raise ArtifactError(f"{type(artifact).__name__} is not an artifact; expected one of {', '.join(KINDS)}")


def save(
    path: Path,
    artifact: Struct,
    *,
    inputs: dict[str, str] | None = None,
    provenance: Provenance | None = None,
) -> None:
    """Writes `artifact`, whole or not at all.

    Args:
        inputs: Hashes of the artifacts that it was made from, by kind.

    Raises:
        StorageError: The folder cannot be written or is full.
    """
    write(path, encode(artifact, inputs=inputs, provenance=provenance))


def encode(
    artifact: Struct, *, inputs: dict[str, str] | None = None, provenance: Provenance | None = None
) -> bytes:
    """`artifact` in its envelope, as `save` writes it."""
    content = msgspec.json.encode(artifact)
    envelope = _Header(
        kind=kind_of(artifact),
        schema_version=SCHEMA_VERSION,
        inputs=inputs or {},
        provenance=provenance or Provenance(),
        content=msgspec.Raw(content),
        digest=hashlib.sha256(content).hexdigest(),
    )
    return msgspec.json.encode(envelope)


def write(path: Path, content: bytes) -> None:
    """As `write_atomically`, for what a stage results in.

    Raises:
        StorageError: The folder cannot be written or is full.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise StorageError(
            f"cannot write {path}: {error.strerror or error}. Free space there, or give another folder "
            f"(artifacts: store; what a run leaves: hydra.run.dir)",
            key="store or hydra.run.dir",
            found=str(error),
            expected="a writable folder with enough space",
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes to another name beside `path`, syncs, and renames: `path` is whole, or as it was.

    Raises:
        OSError: The folder cannot be written or is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_away(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _clear_away(path: Path) -> None:
    """Removes what killed processes left of their writes to `path`: nobody holds the lock on that."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        process = part.name.split(".")[-2]
        if Path("/proc", process).exists():  # it may be about to take its lock
            continue
        with contextlib.suppress(FileNotFoundError, BlockingIOError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def load(path: Path, record: type[Artifact]) -> Artifact:
    """Reads the artifact of type `record` from `path`.

    Raises:
        ArtifactError: The file is missing, damaged, of another kind or version, or holds a field
            or type that the schema does not know.
    """
    return load_with_provenance(path, record)[0]


def load_with_provenance(path: Path, record: type[Artifact]) -> tuple[Artifact, Provenance]:
    expected = next(kind for kind, known in KINDS.items() if known is record)
    try:
        header = msgspec.json.decode(path.read_bytes(), type=_Header)
        if header.kind != expected:
            raise ArtifactError(f"{path} is a {header.kind}; expected a {expected}")
        if header.schema_version != SCHEMA_VERSION:
            raise ArtifactError(
                f"{path} has schema version {header.schema_version}; expected {SCHEMA_VERSION}. "
                f"Make it again with this version"
            )
        if header.digest != hashlib.sha256(memoryview(header.content)).hexdigest():
            raise ArtifactError(f"{path} was altered after it was written. Delete it and run again")
        content = msgspec.json.decode(header.content, type=record)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist; run the stage that makes it first") from error
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ArtifactError(f"{path} is not a valid {expected}: {error}. Delete it and run again") from error
    if isinstance(content, RegionGraph):
        check_graph(content)
    if isinstance(content, Checkpoint):
        check_seal(content)
    return content, header.provenance


def content_hash(path: Path) -> str:
    """SHA-256 of the file, which identifies an artifact as another's input."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
