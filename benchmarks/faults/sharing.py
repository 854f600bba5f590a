"""Trials in two processes at once, each with folders of its own."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

from benchmarks.faults import in_process, whole
from benchmarks.faults.trial import Outcome, Trial, WrongError

#: processes
WORKERS = 2


def share(work: Path, quick: bool, only: str, index: int) -> list[Outcome]:
    """Every `WORKERS`-th trial from `index` on, in a process and folders of its own."""
    made = [
        trial
        for module in (in_process, whole)
        for trial in module.trials(work / module.__name__.rpartition(".")[2], quick)
        if only in trial.kind
    ]
    return [_happen(trial) for trial in made[index::WORKERS]]


def _happen(trial: Trial) -> Outcome:
    started, said = time.monotonic(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            result, wrong = trial.run(), ""
    except WrongError as error:
        result, wrong = "wrong", str(error)
    outcome = Outcome(trial.kind, trial.what, result, time.monotonic() - started, wrong)
    print(
        f"{outcome.kind}: {outcome.what}: {outcome.wrong or outcome.result}, {outcome.seconds:.1f} s",
        flush=True,
    )
    return outcome
