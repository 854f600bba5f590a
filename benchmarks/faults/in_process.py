"""Faults of the disk while the training stage runs, in this process: small models, hundreds of runs."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.faults.trial import REFUSED, SAME, Trial, require
from stages.artifacts.errors import StageError
from stages.artifacts.summary import Summary
from stages.config import CheckpointConfig
from stages.runtime.stage import Surroundings
from tests.faults.injection import DELAY, SHORT, Fault, injected
from tests.parity.harness import ADVERSARIAL, LEAST, RESIDENT, Variant
from tests.runtime.sessions_on_disk import Job

STEPS = 4
#: parts of paths: the disk tier's file, scratch folders, checkpoints, exported weights
TIER, SCRATCH, SAVED, EXPORT = "tier-", "stages-scratch", "checkpoints", "final"
_MOST_S = 10.0


class Small:
    """A small model: its undisturbed run in memory, and runs with faults."""

    def __init__(self, name: str, precision: str, folder: Path) -> None:
        self.job = Job(name, precision, folder)
        self.folder = folder
        self.saved = folder / "run" / "checkpoints"

    @cached_property
    def expected(self) -> tuple[Summary, dict[str, Tensor]]:
        return self.job.run(RESIDENT, steps=STEPS)

    def absorbs(self, faults: Sequence[Fault], variant: Variant) -> str:
        """The numbers stay."""
        self._clear()
        with injected(*faults) as injector:
            found = self._train(variant)
        require(injector.happened > 0, "the fault did not happen")
        self._check_numbers(found)
        return SAME

    def refuses(self, fault: Fault, resume: bool = False) -> str:
        """One error within ten seconds, nothing left behind; what is saved goes on to the same numbers."""
        self._clear()
        threads = threading.active_count()
        if resume:
            self._train(LEAST, steps=2)
            shutil.rmtree(self.job.folder / "final")
        started, refusal = time.monotonic(), ""
        with injected(fault) as injector:
            try:
                found = self._train(LEAST, str(self.saved) if resume else "")
            except StageError as error:
                refusal = str(error)
        require(injector.happened > 0, "the fault did not happen")
        require(threading.active_count() == threads, "threads are left")
        require(not [*(self.job.folder / "disk").glob("*")], "scratch files are left")
        if not refusal:
            self._check_numbers(found)
            return SAME
        require("/" in refusal and len(refusal) > 40, f"a poor message: {refusal}")
        require(time.monotonic() - started < _MOST_S, "it took over ten seconds to end")
        self._check_export()
        saved = [*self.saved.glob("*")] if self.saved.exists() else []
        require(all(one.name.startswith("step-") for one in saved), f"half a checkpoint is left: {saved}")
        self._check_numbers(self._train(LEAST, str(self.saved) if saved else ""))
        return REFUSED

    def _train(
        self, variant: Variant, resume: str = "", steps: int = STEPS
    ) -> tuple[Summary, dict[str, Tensor]]:
        every = CheckpointConfig(every=1, keep=3)
        surroundings = Surroundings(self.folder / "run", reports=False)
        return self.job.run(variant, surroundings, steps=steps, checkpoint=every, resume=resume)

    def _clear(self) -> None:
        assert self.expected
        for folder in (self.folder / "run", self.job.folder / "final"):
            shutil.rmtree(folder, ignore_errors=True)

    def _check_export(self) -> None:
        """Whole or absent: its folder may fail to sync after all is in place."""
        left = [*(self.job.folder / "final").glob("*")]
        require(all(path.name == "model.safetensors" for path in left), f"half an export is left: {left}")
        for path in left:
            weights = load_file(path)
            require(
                all(torch.equal(weights[name], one) for name, one in self.expected[1].items()), "wrong export"
            )

    def _check_numbers(self, found: tuple[Summary, dict[str, Tensor]]) -> None:
        summary, weights = self.expected
        require(found[0].losses == summary.losses, "other losses")
        for name, tensor in weights.items():
            require(torch.equal(found[1][name], tensor), f"another {name}")


def trials(work: Path, quick: bool) -> Iterator[Trial]:
    """Absorbed faults on several models, then what must end in an error on one of them."""
    mlp = Small("mlp", "fp32", work / "mlp-fp32")
    models = [mlp] if quick else [mlp, *(Small(*pair, work / "-".join(pair)) for pair in _PAIRS)]
    for model in models:
        yield from _absorbed(model, model.folder.name)
    faults = [*_failing()]
    for fault in faults[:: 6 if quick else 1]:
        yield Trial(_KINDS[fault.path], _words(fault), lambda fault=fault: mlp.refuses(fault))
    for kind in ("EIO", "EACCES"):
        for at in (1, 2, 5, 9)[:: 2 if quick else 1]:
            fault = Fault("read", kind, SAVED, at)
            what = f"{_words(fault)}, on going on"
            yield Trial(_KINDS[SAVED], what, lambda fault=fault: mlp.refuses(fault, resume=True))


_PAIRS = (("mlp", "bf16"), ("gpt2", "fp16"), ("t5", "fp32"), ("bert", "bf16"))
_KINDS = {
    TIER: "disk tier",
    SCRATCH: "disk tier",
    SAVED: "checkpoint",
    EXPORT: "export",
}


def _absorbed(model: Small, name: str) -> Iterator[Trial]:
    read, write = Fault("read", SHORT, lasting=True), Fault("write", SHORT, lasting=True)
    late = [Fault(call, DELAY, lasting=True) for call in ("read", "write")]
    found = {"short reads": [read], "short writes": [write], "late transfers": late}
    for what, faults in found.items():
        for variant in (LEAST, ADVERSARIAL):
            yield Trial(
                "short and late transfers",
                f"{what}, {name}, {variant.name}",
                lambda faults=faults, variant=variant: model.absorbs(faults, variant),
            )


def _failing() -> Iterator[Fault]:
    for at in (1, 2, 3, 5, 8, 13, 21, 34, 55):
        yield Fault("read", "EIO", TIER, at)
        for kind in ("EIO", "ENOSPC"):
            yield Fault("write", kind, TIER, at)
    for kind in ("ENOSPC", "EDQUOT", "EIO", "EROFS"):
        yield Fault("reserve", kind, TIER)
    for kind in ("EACCES", "EROFS", "ENOSPC", "EMFILE"):
        yield Fault("make", kind, TIER)
        yield Fault("make", kind, SCRATCH)
        yield Fault("make", kind, SAVED)
    for at in (1, 2, 6, 15, 30):
        for kind in ("EIO", "ENOSPC", "EROFS"):
            yield Fault("write", kind, SAVED, at, lasting=True)
    for at in (1, 2, 3, 4, 7):
        yield Fault("sync", "EIO", SAVED, at)
        yield Fault("rename", "EIO", SAVED, at)
        yield Fault("rename", "EACCES", SAVED, at)
    for at in (1, 2, 5):
        for kind in ("EIO", "ENOSPC"):
            yield Fault("write", kind, EXPORT, at, lasting=True)
    for kind in ("EIO", "ENOSPC"):
        yield Fault("sync", kind, EXPORT)
        yield Fault("sync", kind, EXPORT, at=2)
        yield Fault("rename", kind, EXPORT)
    yield Fault("make", "EROFS", EXPORT)


def _words(fault: Fault) -> str:
    lasting = " and after" if fault.lasting else ""
    return f"{fault.kind} at {fault.call} {fault.at}{lasting} of {fault.path}"
