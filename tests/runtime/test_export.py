"""Exported weights: read back by safetensors and transformers, one tensor in memory at a time."""

from __future__ import annotations

import json
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from stages.artifacts import graph as g
from stages.artifacts.errors import StorageError
from stages.runtime import export, safetensors_writer
from stages.runtime.export import export_initial, export_weights


def graph_of(
    model: nn.Module, config: str | None = None
) -> tuple[g.RegionGraph, list[tuple[g.Parameter, torch.Tensor]]]:
    """A graph with the model's tensors and nothing else, and their values."""
    found: dict[int, tuple[list[str], torch.Tensor, str]] = {}
    persistent = set(model.state_dict())
    for role, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            found.setdefault(id(tensor), ([], tensor, role))[0].append(name)
    parameters, weights = [], []
    for names, tensor, role in found.values():
        dtype = str(tensor.dtype).removeprefix("torch.")
        spec = g.TensorSpec(list(tensor.shape), list(tensor.stride()), dtype)
        parameter = g.Parameter(
            names[0], names, spec, role, persistent=names[0] in persistent, initial_dtype=dtype
        )
        parameters.append(parameter)
        weights.append((parameter, tensor.detach()))
    graph = g.RegionGraph(
        "m", "train", "fp32", {}, [], [], "loss", [], [], [], parameters, g.Initial("replay"), config
    )
    return graph, weights


class Mixed(nn.Module):
    """Several dtypes in an order that would leave wide elements unaligned, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(3, dtype=torch.uint8))
        self.half = nn.Linear(5, 3, bias=False).bfloat16()
        self.again = self.first
        self.register_buffer("cache", torch.ones(2), persistent=False)


@pytest.fixture
def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def test_a_strict_load_finds_every_tensor_and_keeps_the_alias(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    files = export_weights(tmp_path, graph, weights)
    assert files == [tmp_path / "model.safetensors"]
    other = Mixed()
    load_model(other, files[0], strict=True)
    for name, tensor in mixed.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.again.weight is other.first.weight


def test_a_tied_tensor_is_stored_once_and_no_other_is_missing_or_extra(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    (file,) = export_weights(tmp_path, graph, weights)
    loaded = load_file(file)
    assert set(loaded) == {name for name in mixed.state_dict() if not name.startswith("again")}
    with safe_open(file, framework="pt") as reader:
        assert reader.metadata() == {
            "format": "pt",
            "again.weight": "first.weight",
            "again.bias": "first.bias",
        }


def test_every_tensor_is_aligned_to_its_elements(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    (file,) = export_weights(tmp_path, graph, weights)
    content = file.read_bytes()
    (header_bytes,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_bytes])
    header.pop("__metadata__")
    for name, tensor in load_file(file).items():
        start, stop = header[name]["data_offsets"]
        assert (8 + header_bytes + start) % tensor.element_size() == 0
        assert stop - start == tensor.numel() * tensor.element_size()


def test_the_order_of_values_does_not_matter(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    (one,) = export_weights(tmp_path / "one", graph, weights)
    (other,) = export_weights(tmp_path / "other", graph, reversed(weights))
    assert one.read_bytes() == other.read_bytes()


def test_a_transposed_parameter_is_written_in_the_order_of_its_dimensions(tmp_path: Path) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    graph, weights = graph_of(model)
    (file,) = export_weights(tmp_path, graph, weights)
    assert torch.equal(load_file(file)["weight"], model.weight.detach())


def test_large_models_are_cut_into_shards_with_an_index(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    files = export_weights(tmp_path, graph, reversed(weights), shard_bytes=64)
    shards, index = files[:-1], json.loads(files[-1].read_text())
    assert len(shards) > 2
    assert [shard.name for shard in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    merged = {name: (shard.name, tensor) for shard in shards for name, tensor in load_file(shard).items()}
    assert {name: shard for name, (shard, _) in merged.items()} == index["weight_map"]
    assert all(torch.equal(mixed.state_dict()[name], tensor) for name, (_, tensor) in merged.items())
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in merged.values())
    assert index["metadata"]["total_size"] == total


def test_another_number_of_shards_replaces_the_old_files(mixed: Mixed, tmp_path: Path) -> None:
    graph, weights = graph_of(mixed)
    export_weights(tmp_path, graph, weights, shard_bytes=64)
    export_weights(tmp_path, graph, weights)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    export_weights(tmp_path, graph, weights, shard_bytes=64)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("shard_bytes", [10**9, 50_000], ids=["one file", "shards"])
def test_transformers_loads_the_folder(tmp_path: Path, shard_bytes: int) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    graph, weights = graph_of(model, config.to_json_string())
    files = export_weights(tmp_path, graph, weights, shard_bytes=shard_bytes)
    assert files[-1] == tmp_path / "config.json"
    again = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert again.lm_head.weight is again.transformer.wte.weight
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_one_tensor_at_a_time_is_alive(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])
    graph, weights = graph_of(model)
    alive: list[weakref.ref[torch.Tensor]] = []

    def values() -> Iterator[tuple[g.Parameter, torch.Tensor]]:
        for parameter, tensor in weights:
            assert all(reference() is None for reference in alive), "the writer holds an earlier tensor"
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield parameter, made
            del made

    export_weights(tmp_path, graph, values())
    assert len(alive) == 10


def test_initial_values_are_written_in_the_dtype_before_the_cast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    graph, _ = graph_of(nn.Linear(3, 2).bfloat16())
    graph = g.RegionGraph(
        **{
            **{field: getattr(graph, field) for field in graph.__struct_fields__},
            "parameters": [
                g.Parameter(p.name, p.names, p.spec, p.role, initial_dtype="float32")
                for p in graph.parameters
            ],
        }
    )

    def initial(of: g.RegionGraph, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        assert (of, seed) == (graph, 7)
        yield "bias", model.bias.detach()
        yield "weight", model.weight.detach()

    monkeypatch.setattr(export, "iterate_initial", initial)
    (file,) = export_initial(tmp_path, graph, seed=7)
    assert torch.equal(load_file(file)["weight"], model.weight.detach())


# faults


@pytest.mark.parametrize("fault", ["missing", "twice", "shape", "dtype"])
def test_values_that_do_not_fit_the_graph_leave_no_file(mixed: Mixed, tmp_path: Path, fault: str) -> None:
    graph, weights = graph_of(mixed)
    parameter, tensor = weights[1]
    if fault == "missing":
        weights = weights[:-2]
    elif fault == "twice":
        weights.append(weights[0])
    elif fault == "shape":
        weights[1] = (parameter, tensor.unsqueeze(0))
    else:
        weights[1] = (parameter, tensor.double())
    with pytest.raises(ValueError, match="expected"):
        export_weights(tmp_path, graph, weights)
    assert list(tmp_path.iterdir()) == []


def test_a_full_device_is_told_and_the_old_files_stay(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = graph_of(mixed)
    (file,) = export_weights(tmp_path, graph, weights)
    before = file.read_bytes()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_writer.os, "pwritev", full)
    with pytest.raises(StorageError, match="No space left") as failure:
        export_weights(tmp_path, graph, [(p, t + 1 if t.is_floating_point() else t) for p, t in weights])
    assert failure.value.key == "export"
    assert file.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]


def test_short_writes_are_finished(mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    real = os.pwritev

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:3]], offset)

    monkeypatch.setattr(safetensors_writer.os, "pwritev", short)
    graph, weights = graph_of(mixed)
    (file,) = export_weights(tmp_path, graph, weights)
    assert torch.equal(load_file(file)["first.weight"], mixed.first.weight.detach())


def test_a_device_that_takes_nothing_is_an_error_not_a_loop(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer.os, "pwritev", lambda *_: 0)
    graph, weights = graph_of(mixed)
    with pytest.raises(StorageError, match="No space left"):
        export_weights(tmp_path, graph, weights)


def test_a_file_in_the_way_of_the_folder_is_told(mixed: Mixed, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("x")
    graph, weights = graph_of(mixed)
    with pytest.raises(StorageError, match="another folder"):
        export_weights(place, graph, weights)


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wave", torch.zeros(2, dtype=torch.complex128))
    graph, weights = graph_of(model)
    with pytest.raises(ValueError, match="complex128"):
        export_weights(tmp_path, graph, weights)


def test_at_no_moment_is_a_mixture_of_two_exports_readable(
    mixed: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at any renaming, a reader finds no entry file, or one whose files are all of one export."""
    folder = tmp_path / "weights"
    graph, weights = graph_of(mixed)
    export_weights(folder, graph, weights, shard_bytes=1)
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    replace = Path.replace
    seen = []

    def watched(part: Path, target: Path) -> Path:
        result = replace(part, target)
        entry = folder / "model.safetensors.index.json"
        shards = list(folder.glob("model-*.safetensors"))
        changed = [path for path in shards if path.read_bytes() != old.get(path.name)]
        seen.append(entry.exists())
        assert not entry.exists() or len(changed) in (0, len(shards))
        return result

    monkeypatch.setattr(Path, "replace", watched)
    others = [(item, ~tensor if tensor.dtype is torch.bool else tensor + 1) for item, tensor in weights]
    export_weights(folder, graph, others, shard_bytes=1)
    assert seen[-1]
    assert not all(seen)


def test_what_a_killed_export_left_is_removed(mixed: Mixed, tmp_path: Path) -> None:
    left = tmp_path / ".model.safetensors.1.part"
    left.touch()
    export_weights(tmp_path, *graph_of(mixed))
    assert not left.exists()
