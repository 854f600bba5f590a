"""Case 21: an offload folder that is too small, or that somebody fills while the training runs."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.artifacts.errors import StorageError
from stages.config import CheckpointConfig, TiersConfig
from stages.runtime.stage import Surroundings
from stages.runtime.tiers import space
from tests.faults.injection import Fault, injected
from tests.memory_limit import is_available
from tests.parity.harness import LEAST, RESIDENT
from tests.runtime.sessions_on_disk import Job

SMALL_BYTES = 8 * 10**6
STEPS = 5


def assert_refused(job: Job, disk: Path) -> None:
    """Before any value is made; the message has both sizes."""
    needed = job.plan(LEAST).disk_bytes
    with pytest.raises(StorageError) as refusal:
        job.run(LEAST, tiers=TiersConfig(disk=str(disk)))
    assert str(needed) in str(refusal.value)
    assert str(space.free_bytes(disk)) in str(refusal.value)
    assert refusal.value.key == "tiers.disk"
    assert [*disk.iterdir()] == []


def assert_goes_on(job: Job, saved: Path) -> None:
    """From the last checkpoint, which the error left whole, to the numbers of an undisturbed run."""
    expected, weights = job.run(RESIDENT, steps=STEPS)
    assert [folder.name for folder in saved.iterdir()] == ["step-2"]
    found, found_weights = job.run(LEAST, steps=STEPS, resume=str(saved))
    assert found.resumed_at == 2
    assert found.losses == expected.losses
    for name, tensor in weights.items():
        assert torch.equal(found_weights[name], tensor), name


def test_a_folder_that_is_too_small_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    job = Job("gpt2", "fp32", tmp_path)
    monkeypatch.setattr(space, "free_bytes", lambda folder: job.plan(LEAST).disk_bytes - 1)
    assert_refused(job, disk)


def test_a_disk_that_fills_up_loses_no_training_state(tmp_path: Path) -> None:
    job = Job("mlp", "fp32", tmp_path / "job")
    full = Fault("write", "ENOSPC", path="step-4", lasting=True)
    threads = threading.active_count()
    with injected(full), pytest.raises(StorageError, match="No space left"):
        job.run(LEAST, Surroundings(tmp_path), steps=STEPS, checkpoint=CheckpointConfig(every=2, keep=1))
    assert threading.active_count() == threads
    assert [*(job.folder / "disk").iterdir()] == []
    assert_goes_on(job, tmp_path / "checkpoints")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of `SMALL_BYTES`."""
    if not is_available():
        pytest.fail("needs the right to mount: run as root, or leave out the marker cgroup")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_BYTES}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.cgroup
@pytest.mark.filterwarnings("ignore:.*is in memory")
def test_a_small_filesystem_is_refused(small_disk: Path, tmp_path: Path) -> None:
    job = Job("gpt2", "fp32", tmp_path)
    (small_disk / "others").write_bytes(bytes(SMALL_BYTES - 200_000))
    disk = small_disk / "disk"
    disk.mkdir()
    assert_refused(job, disk)


@pytest.mark.cgroup
@pytest.mark.filterwarnings("ignore:.*is in memory")
def test_a_small_filesystem_that_somebody_fills(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk tier has its space from the start; the checkpoint is what finds none."""
    job = Job("mlp", "fp32", tmp_path / "job")
    real = space.reserve
    others = small_disk / "others"

    def reserve_and_fill(descriptor: int, folder: Path, size_bytes: int) -> None:
        real(descriptor, folder, size_bytes)
        kept = 1.5 * job.plan(LEAST).disk_bytes
        others.write_bytes(bytes(int(space.free_bytes(small_disk) - kept)))

    monkeypatch.setattr(space, "reserve", reserve_and_fill)
    with pytest.raises(StorageError, match="No space left"):
        job.run(
            LEAST,
            Surroundings(small_disk),
            steps=STEPS,
            checkpoint=CheckpointConfig(every=2, keep=2),
            tiers=TiersConfig(disk=str(small_disk / "disk")),
        )
    assert [*(small_disk / "disk").iterdir()] == []
    saved = shutil.copytree(small_disk / "checkpoints", tmp_path / "saved")
    assert_goes_on(job, saved)
