"""Files that somebody else may have written: read as data, refused where crafted, never run."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import stat
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import stages
from stages.artifacts import envelope
from stages.artifacts.checkpoint import Checkpoint, seal
from stages.artifacts.costs import Costs
from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import RegionGraph, Struct
from stages.artifacts.plan import Plan
from stages.config import CheckpointConfig
from stages.region.safetensors_reader import read_header
from stages.runtime.scratch import ScratchFolder
from stages.runtime.stage import Surroundings
from stages.runtime.tiers import space
from tests.parity.harness import LEAST
from tests.runtime.sessions_on_disk import Job
from tests.sealed import sealed

ROOT = Path(stages.__file__).parent
#: no crafted file of a few kilobytes may make a reader take more than this
MOST_BYTES = 50 * 10**6


class Payload:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    """No unpickling, no evaluation of text, in any module of the package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"} & set(names)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load")
            for keyword in node.keywords:
                if keyword.arg in ("trust_remote_code", "allow_pickle", "weights_only"):
                    wanted = keyword.arg == "weights_only"
                    assert isinstance(keyword.value, ast.Constant), ast.unparse(node)
                    assert keyword.value.value is wanted, ast.unparse(node)


def _with(change: Callable[[dict[str, object]], object]) -> Callable[[bytes], bytes]:
    def crafted(content: bytes) -> bytes:
        record = json.loads(content)
        change(record)
        return sealed({"content": None, **record})

    return crafted


CRAFTED: dict[str, Callable[[bytes], bytes]] = {
    "nested arrays": lambda content: b"[" * 10**6,
    "nested objects": lambda content: b'{"a":' * 10**5,
    "nested inside": lambda content: content.replace(b'"content":{', b'"content":{"x":' + b"[" * 10**5, 1),
    "no text": lambda content: os.urandom(4096),
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "twice": lambda content: content * 2,
    "a list": lambda content: b"[" + content + b"]",
    "null": lambda content: b"null",
    "another kind": _with(lambda record: record.update(kind="timeline")),
    "an unknown kind": _with(lambda record: record.update(kind="os.system")),
    "a later version": _with(lambda record: record.update(schema_version=2)),
    "a version beyond all sizes": _with(lambda record: record.update(schema_version=10**40)),
    "a class to make": _with(lambda record: record["content"].update(_target_="os.system")),  # type: ignore[attr-defined]
    "content of another type": _with(lambda record: record.update(content=[1])),
    "one letter": lambda content: content.replace(b'"version', b'"Version', 1).replace(
        b"float32", b"float33", 1
    ),
    "a number": lambda content: re.sub(rb"([1-9])([,}\]])", rb"0\2", content),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A small run with its checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    job = Job("mlp", "fp32", folder)
    before = os.umask(0)
    try:
        job.run(LEAST, Surroundings(folder), steps=2, checkpoint=CheckpointConfig(every=1, keep=2))
    finally:
        os.umask(before)
    return job


@pytest.mark.parametrize("record", [RegionGraph, Costs, Plan, Checkpoint])
@pytest.mark.parametrize("crafted", CRAFTED.values(), ids=list(CRAFTED))
def test_a_crafted_artifact_is_refused_by_name(
    saved: Job, tmp_path: Path, record: type[Struct], crafted: Callable[[bytes], bytes]
) -> None:
    artifacts: dict[type[Struct], Struct] = {
        RegionGraph: saved.graph,
        Costs: saved.costs,
        Plan: saved.plan(LEAST),
        Checkpoint: envelope.load(saved.folder / "checkpoints/step-2/checkpoint.json", Checkpoint),
    }
    path = tmp_path / "artifact.json"
    path.write_bytes(crafted(envelope.encode(artifacts[record])))
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"artifact\.json"):
            envelope.load(path, record)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def test_a_pickle_in_the_place_of_an_artifact_does_not_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps(Payload(ran)))
    with pytest.raises(ArtifactError, match=r"plan\.json"):
        envelope.load(path, Plan)
    with pytest.raises(ArtifactError, match=r"plan\.json"):
        read_header(path)
    assert not ran.exists()


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


HEADERS = {
    "a length beyond the file": _file({}, length=10**9),
    "a length beyond all files": _file({}, length=2**64 - 1),
    "shorter than its length": b"\x01",
    "nothing": b"",
    "no object": _file([1, 2]),
    "deeply nested": _file(b'{"a":' + b"[" * 10**6),
    "a tensor of another form": _file({"w": {"dtype": "F32", "shape": "all", "data_offsets": [0, 4]}}),
    "a size that is no integer": _file({"w": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]}}),
    "one offset": _file({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}),
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=list(HEADERS))
def test_a_crafted_safetensors_header_is_refused_without_memory_for_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "crafted.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactError, match=r"crafted\.safetensors"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def _resume_with(saved: Job, folder: Path, names: Callable[[str], str]) -> None:
    """Goes on from a checkpoint whose manifest names other files, its seal made anew."""
    source = saved.folder / "checkpoints" / "step-2"
    manifest = envelope.load(source / "checkpoint.json", Checkpoint)
    record = json.loads(json.dumps(_plain(manifest)))
    for tensor in record["tensors"]:
        tensor["file"] = names(tensor["file"])
    folder.mkdir(exist_ok=True)
    crafted = seal(_checkpoint(record))
    envelope.save(folder / "checkpoint.json", crafted)
    saved.run(LEAST, steps=3, resume=str(folder))


def _plain(manifest: Checkpoint) -> object:
    return json.loads(envelope.encode(manifest))["content"]


def _checkpoint(record: object) -> Checkpoint:
    import msgspec

    return msgspec.convert(record, Checkpoint)


@pytest.mark.parametrize("where", ["../step-2/{}", "/etc/{}", "deep/{}", "..", ""])
def test_a_checkpoint_cannot_name_files_outside_its_folder(saved: Job, tmp_path: Path, where: str) -> None:
    with pytest.raises(ArtifactError, match="plain name"):
        _resume_with(saved, tmp_path / "crafted", lambda name: where.format(name))


def test_a_link_out_of_a_checkpoint_is_not_followed(saved: Job, tmp_path: Path) -> None:
    crafted = tmp_path / "crafted"

    def linked(name: str) -> str:
        crafted.mkdir(exist_ok=True)
        link = crafted / name
        if not link.is_symlink():
            link.symlink_to(saved.folder / "checkpoints" / "step-2" / name)
        return name

    with pytest.raises(ArtifactError, match="symbolic link"):
        _resume_with(saved, crafted, linked)


def test_what_a_run_saves_is_its_users_alone_whatever_the_umask(saved: Job, tmp_path: Path) -> None:
    for folder in (saved.folder / "checkpoints").iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.glob("*.safetensors"):
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = os.umask(0)
    try:
        with ScratchFolder(tmp_path) as scratch:
            assert stat.S_IMODE(scratch.stat().st_mode) == 0o700
            descriptor, _ = space.open_nameless(scratch)
            assert stat.S_IMODE(os.fstat(descriptor).st_mode) == 0o600
            assert list(scratch.iterdir()) == []
            os.close(descriptor)
    finally:
        os.umask(before)


def test_pickled_weights_do_not_run(tmp_path: Path) -> None:
    """A folder whose weights are a pickle alone is refused before it is read."""
    from transformers import BertConfig

    from stages.config import DataConfig, DeviceConfig, ModelConfig, OptimizerConfig, RunConfig
    from stages.trace import stage as trace

    ran = tmp_path / "ran"
    BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=300
    ).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(ran)))
    torch.save({"bert.pooler.dense.bias": torch.ones(8)}, tmp_path / "other.bin")
    config = RunConfig(
        device=DeviceConfig(name="cpu"),
        model=ModelConfig("hf", "directory", "transformers.BertForMaskedLM", path=str(tmp_path)),
        data=DataConfig(name="random", batch_size=1, seq_len=8),
        optimizer=OptimizerConfig(name="adamw"),
    )
    with pytest.raises(stages.artifacts.errors.StageError, match="safetensors"):
        trace.run(config)
    assert not ran.exists()
