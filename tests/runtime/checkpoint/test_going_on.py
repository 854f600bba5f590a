"""A run that stops at a step and goes on under another plan gives the numbers of one that did not."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from stages.artifacts.checkpoint import Checkpoint, DataPosition, Progress
from stages.artifacts.errors import ArtifactError, ConfigError, StorageError
from stages.artifacts.summary import Summary
from stages.config import CheckpointConfig, DataConfig, OptimizerConfig
from stages.runtime.checkpoint.read import load_manifest, restore
from stages.runtime.checkpoint.write import save
from stages.runtime.safetensors_writer import SyncedWriter
from stages.runtime.stage import Surroundings, open_engine
from tests.models_for_tests import BY_NAME, LENGTH
from tests.parity.harness import (
    ADVERSARIAL,
    LEARNING_RATE,
    LEAST,
    RESIDENT,
    REUSED_SLOTS,
    SEED,
    Variant,
    config_of,
    initial_values,
    inputs_of,
    plan_of,
    traced,
)
from tests.runtime.sessions_on_disk import Job
from tests.sealed import sealed

EVERY_3 = CheckpointConfig(every=3)


def assert_same(
    found: tuple[Summary, dict[str, Tensor]], expected: tuple[Summary, dict[str, Tensor]]
) -> None:
    assert found[0].losses == expected[0].losses
    assert found[0].grad_norms == expected[0].grad_norms
    assert found[0].skipped_steps == expected[0].skipped_steps
    assert set(found[1]) == set(expected[1])
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("before", "after"), [(RESIDENT, ADVERSARIAL), (LEAST, RESIDENT)], ids=lambda v: v.name
)
def test_losses_and_weights_are_bitwise_those_of_an_undisturbed_run(
    tmp_path: Path, precision: str, before: Variant, after: Variant
) -> None:
    job = Job("mlp", precision, tmp_path)
    expected = job.run(REUSED_SLOTS, steps=6)
    job.run(before, Surroundings(tmp_path), steps=4, checkpoint=EVERY_3)
    found = job.run(after, steps=6, resume=str(tmp_path / "checkpoints"))
    assert_same(found, expected)
    assert found[0].resumed_at == 3
    assert found[0].replanned_at is None


@pytest.mark.parametrize("name", ["gpt2", "t5", "three_way_tie", "partly_used"])
def test_ties_and_unused_weights_go_along(tmp_path: Path, name: str) -> None:
    job = Job(name, "fp32", tmp_path)
    expected = job.run(steps=5)
    job.run(LEAST, Surroundings(tmp_path), steps=3, checkpoint=EVERY_3)
    assert_same(job.run(steps=5, resume=str(tmp_path / "checkpoints")), expected)


@pytest.mark.parametrize("name", ["conv_bn", "odd_mlp"])
def test_running_statistics_and_odd_sizes_go_along(tmp_path: Path, name: str) -> None:
    model = BY_NAME[name]
    graph, costs = traced(model, "fp32", 2)
    batches = [inputs_of(graph, batch) for batch in model.batches(4)]
    config = config_of(model, "fp32", rows=2, disk=tmp_path / "disk")
    plans = [plan_of(config_of(model, "fp32", rows=2, budget=1), graph, costs, LEAST)]
    plans.append(plan_of(config, graph, costs, RESIDENT))
    torch.manual_seed(SEED)
    with open_engine(config, graph, plans[0]) as engine:
        engine.load(initial_values(model, graph))
        for batch in batches[:2]:
            engine.step(batch, LEARNING_RATE)
        save(tmp_path / "state", engine.homes(), manifest(engine.update_counts))
        expected = [engine.step(batch, LEARNING_RATE).loss for batch in batches[2:]]
        weights = {parameter.name: tensor.clone() for parameter, tensor in engine.weights()}
    with open_engine(config, graph, plans[1]) as engine:
        stored = load_manifest(tmp_path / "state")
        engine.restore(lambda homes: restore(tmp_path / "state", stored, homes), stored.update_counts)
        assert [engine.step(batch, LEARNING_RATE).loss for batch in batches[2:]] == expected
        for parameter, tensor in engine.weights():
            assert torch.equal(tensor, weights[parameter.name]), parameter.name


@pytest.mark.parametrize("optimizer", ["torch.optim.Adafactor", "adagrad"])
def test_an_optimizer_with_state_of_other_shapes_goes_on(tmp_path: Path, optimizer: str) -> None:
    settings = OptimizerConfig(name=optimizer, lr=1e-2)
    job = Job("mlp", "fp32", tmp_path, optimizer=settings)
    expected = job.run(LEAST, steps=4)
    job.run(LEAST, Surroundings(tmp_path), steps=3, checkpoint=EVERY_3)
    assert_same(job.run(RESIDENT, steps=4, resume=str(tmp_path / "checkpoints")), expected)


@pytest.fixture
def saved(tmp_path: Path) -> Job:
    job = Job("mlp", "fp32", tmp_path)
    job.run(LEAST, Surroundings(tmp_path), steps=6, checkpoint=CheckpointConfig(every=2, keep=2))
    return job


def test_the_newest_stay_private_and_readable_by_others_tools(saved: Job) -> None:
    folder = saved.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step-4", "step-6"]
    assert stat.S_IMODE((folder / "step-6").stat().st_mode) == 0o700
    [file] = (folder / "step-6").glob("*.safetensors")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    tensors = load_file(file)
    assert tensors["weight/blocks.0.up.weight"].shape == (128, 64)
    assert tensors["state/exp_avg/blocks.0.up.weight"].shape == (128, 64)


def test_an_older_one_can_be_named(saved: Job) -> None:
    summary, _ = saved.run(steps=5, resume=str(saved.folder / "checkpoints" / "step-4"))
    assert summary.resumed_at == 4
    assert len(summary.losses) == 5


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"steps": 5}, "steps"),
        ({"steps": 9, "data": DataConfig(name="random", batch_size=1, seq_len=LENGTH)}, "data.batch_size"),
    ],
)
def test_what_cannot_go_on_from_it_is_refused_by_key(saved: Job, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        saved.run(resume=str(saved.folder / "checkpoints"), **changes)
    assert refusal.value.key == key


def test_batches_cut_otherwise_are_refused(saved: Job, tmp_path: Path) -> None:
    """Their gradients would be summed in another order."""
    cut = Job("mlp", "fp32", tmp_path, micro_batches=2)
    with pytest.raises(ConfigError, match=r"train\.micro_batches is 2"):
        cut.run(steps=9, resume=str(saved.folder / "checkpoints"))


def test_another_model_is_refused_naming_a_tensor(saved: Job, tmp_path: Path) -> None:
    other = Job("gpt2", "fp32", tmp_path)
    with pytest.raises(ArtifactError, match=r"does not fit this job: \w+/"):
        other.run(steps=9, resume=str(saved.folder / "checkpoints"))


def test_a_folder_without_checkpoints_is_refused(saved: Job, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        saved.run(steps=9, resume=str(tmp_path / "final"))


@pytest.mark.parametrize("damage", ["content", "truncated", "number", "path", "manifest", "missing"])
def test_damage_is_noticed_before_a_step_is_made(saved: Job, damage: str) -> None:
    folder = saved.folder / "checkpoints" / "step-6"
    [file] = folder.glob("*.safetensors")
    manifest_file = folder / "checkpoint.json"
    content = bytearray(file.read_bytes())
    if damage == "content":
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "truncated":
        file.write_bytes(content[:-1000])
    elif damage == "missing":
        file.unlink()
    elif damage == "manifest":
        manifest_file.write_bytes(manifest_file.read_bytes()[:-100])
    else:
        record = json.loads(manifest_file.read_text())
        if damage == "number":
            record["content"]["data"]["position"] += 1
        else:
            for tensor in record["content"]["tensors"]:
                tensor["file"] = f"../step-4/{tensor['file']}"
        manifest_file.write_bytes(sealed(record))
    with pytest.raises(ArtifactError):
        saved.run(steps=9, resume=str(folder))


def test_a_full_disk_leaves_nothing_half_written(
    saved: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(self: SyncedWriter, view: memoryview, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SyncedWriter, "write", full)
    config = CheckpointConfig(every=1, dir=str(tmp_path / "full"))
    with pytest.raises(StorageError, match="No space left"):
        saved.run(steps=2, checkpoint=config)
    assert list((tmp_path / "full").iterdir()) == []


def manifest(update_counts: dict[str, int]) -> Checkpoint:
    return Checkpoint(
        step=2,
        model="m",
        precision="fp32",
        implementation="fused_adamw",
        data=DataPosition("random", 2, 32, 2),
        update_counts=update_counts,
        scaler=None,
        micro_batches=1,
        random_state="",
        progress=Progress([], [], [], [], [], [], [], 0, 0, 0, 0),
        tensors=[],
    )
