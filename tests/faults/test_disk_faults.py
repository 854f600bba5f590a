"""A disk that does less than it was asked for, late, or nothing any more."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest
import torch

from stages.artifacts.errors import StorageError
from stages.config import CheckpointConfig
from stages.runtime.stage import Surroundings
from tests.faults.injection import DELAY, SHORT, Fault, injected
from tests.parity.harness import ADVERSARIAL, LEAST, RESIDENT, Variant
from tests.runtime.sessions_on_disk import Job

STEPS = 3
EVERY_STEP = CheckpointConfig(every=1, keep=2)

ABSORBED = {
    "short reads": (Fault("read", SHORT, lasting=True),),
    "short writes": (Fault("write", SHORT, lasting=True),),
    "delays": (Fault("read", DELAY, lasting=True), Fault("write", DELAY, lasting=True)),
}
DISK, CHECKPOINTS, EXPORT = "tier-", "checkpoints", "final"


@pytest.mark.parametrize("faults", ABSORBED.values(), ids=list(ABSORBED))
@pytest.mark.parametrize(
    ("name", "precision", "variant"),
    [("mlp", "fp32", LEAST), ("mlp", "bf16", ADVERSARIAL), ("gpt2", "fp16", LEAST), ("t5", "fp32", LEAST)],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_a_disk_may_do_changes_no_number(
    tmp_path: Path, name: str, precision: str, variant: Variant, faults: tuple[Fault, ...]
) -> None:
    job = Job(name, precision, tmp_path)
    expected, weights = job.run(RESIDENT, steps=STEPS)
    with injected(*faults) as injector:
        found, found_weights = job.run(variant, steps=STEPS)
    assert injector.happened > 0
    assert found.losses == expected.losses
    for tensor_name, tensor in weights.items():
        assert torch.equal(found_weights[tensor_name], tensor), tensor_name


FAILING = [
    *(Fault("read", "EIO", DISK, at) for at in (1, 2, 17)),
    *(Fault("write", kind, DISK, at) for kind in ("EIO", "ENOSPC") for at in (1, 25)),
    Fault("reserve", "ENOSPC", DISK),
    Fault("reserve", "EIO", DISK),
    *(Fault("make", kind, DISK) for kind in ("EACCES", "EROFS")),
    Fault("make", "EROFS", "stages-scratch"),
    *(Fault("write", "ENOSPC", CHECKPOINTS, at, lasting=True) for at in (1, 9)),
    *(Fault("sync", "EIO", CHECKPOINTS, at) for at in (1, 3)),
    Fault("rename", "EIO", CHECKPOINTS, at=2),
    Fault("make", "EACCES", CHECKPOINTS),
    Fault("write", "ENOSPC", EXPORT, lasting=True),
    Fault("sync", "EIO", EXPORT),
]


@pytest.mark.parametrize(
    "fault", FAILING, ids=lambda fault: f"{fault.call}-{fault.kind}-{fault.path}-{fault.at}"
)
def test_what_it_may_not_do_is_one_error_and_leaves_nothing_half_done(tmp_path: Path, fault: Fault) -> None:
    """Scratch files and threads are gone, no file is half-written, and what was saved goes on bitwise."""
    job = Job("mlp", "fp32", tmp_path / "job")
    expected, weights = job.run(RESIDENT, steps=STEPS)
    shutil.rmtree(job.folder / "final")
    threads = threading.active_count()
    with injected(fault) as injector, pytest.raises(StorageError) as refusal:
        job.run(LEAST, Surroundings(tmp_path), steps=STEPS, checkpoint=EVERY_STEP)
    assert injector.happened > 0
    assert refusal.value.key
    assert "/" in str(refusal.value), "the message names no file"
    assert threading.active_count() == threads
    assert [*(job.folder / "disk").glob("*")] == []
    assert [*(job.folder / "final").glob("*")] == []
    saved = [*(tmp_path / "checkpoints").glob("*")]
    assert all(folder.name.startswith("step-") for folder in saved), saved
    resume = str(tmp_path / "checkpoints") if saved else ""
    found, found_weights = job.run(LEAST, steps=STEPS, resume=resume)
    assert found.losses == expected.losses
    for name, tensor in weights.items():
        assert torch.equal(found_weights[name], tensor), name
