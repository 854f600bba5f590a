"""What `benchmarks.prediction` runs, and running it: the command, as a user gives it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.processors import watch_others
from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.solve.task import budget_for

ROOT = Path(__file__).resolve().parents[1]
SEQ_LEN = 512
BUDGETS = 4
#: share of the processors' time that others may take before a command is repeated, and how often it is
QUIET_SHARE = 0.05
MOST_TRIES = 3
#: so large that everything stays on the device
_AMPLE = "1000GB"

#: name in the table -> overrides. The T5 has six layers each way: 124 million parameters, as GPT-2 has
MODELS = {
    "gpt2": ["+model=gpt2"],
    "bert": ["+model=bert-base"],
    "t5": ["+model=t5-base", "model.arguments.num_layers=6", "model.arguments.num_decoder_layers=6"],
}


@dataclass(frozen=True)
class Case:
    """A model on a batch: traced and profiled once, planned for several budgets."""

    model: str
    precision: str
    batch_size: int
    seq_len: int = SEQ_LEN

    @property
    def name(self) -> str:
        return f"{self.model} {self.precision} {self.batch_size}x{self.seq_len}"

    @property
    def overrides(self) -> list[str]:
        sizes = [f"data.batch_size={self.batch_size}", f"data.seq_len={self.seq_len}"]
        return [*MODELS[self.model], f"precision={self.precision}", "data=random", *sizes]


class CommandFailedError(Exception):
    """A command of ours ended otherwise than expected; the message holds the end of what it printed."""


class Run(msgspec.Struct, frozen=True):
    """One finished job. others_share: of the processors' time, what other processes took meanwhile."""

    case: str
    budget_bytes: int
    repeat: int
    peak_bytes: int
    runtime_peak_bytes: int
    predicted_peak_bytes: int
    least_feasible_bytes: int
    step_times_s: list[float]
    predicted_step_time_s: float
    moved_bytes: int
    others_share: float


def cases(models: Iterable[str], precisions: Iterable[str], batches: list[int], *, full: bool) -> list[Case]:
    """Every combination with `full`; else each model and precision once, with the batch sizes in turn."""
    combined = [(model, precision) for model in models for precision in precisions]
    if full:
        return [Case(*pair, batch) for pair in combined for batch in batches]
    # shifted by one from model to model, so that neither precision always has the same size
    shifts = [index + index // 2 for index in range(len(combined))]
    return [Case(*pair, batches[shift % len(batches)]) for pair, shift in zip(combined, shifts, strict=True)]


def budgets_of(case: Case, work: Path) -> list[int]:
    """From the least feasible budget to one that keeps everything on the device, geometrically spaced.

    Traces and profiles the case where the store in `work` has not got it yet.
    """
    folder = work / "plans" / case.name.replace(" ", "-")
    _command("stages.trace", case, folder, work, f"budget={_AMPLE}")
    _profile(case, folder, work)
    _command("stages.solve", case, folder, work, f"budget={_AMPLE}")
    plan = envelope.load(folder / "plan.json", Plan)
    least = plan.prediction.least_feasible_bytes
    ratio = max(1.0, budget_for(plan.prediction.peak_bytes) / least)
    return [round(least * ratio ** (index / (BUDGETS - 1))) for index in range(BUDGETS)]


def _profile(case: Case, folder: Path, work: Path) -> None:
    """Profiles again, a few times, while other processes disturb it: the store would keep their time."""
    for attempt in range(1, MOST_TRIES + 1):
        done = _command("stages.trace.profile", case, folder, work, f"budget={_AMPLE}")
        if "reused from the store" in done.output or done.others_share <= QUIET_SHARE:
            return
        if attempt < MOST_TRIES:
            key = envelope.load_with_provenance(folder / "costs.json", Costs)[1].key
            shutil.rmtree(work / "store" / "profile" / key)


def run(case: Case, budget_bytes: int, repeat: int, steps: int, work: Path) -> Run:
    """A short training run in the case's store.

    Raises:
        CommandFailedError: It did not end well.
    """
    folder = work / "runs" / f"{case.name.replace(' ', '-')}-{budget_bytes}"
    # a plan solved again from its own first steps would be held against what corrected it
    settings = (f"budget={budget_bytes}", f"steps={steps}", "solver.replan=never")
    done = _command("stages.run", case, folder, work, *settings)
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    return Run(
        case=case.name,
        budget_bytes=budget_bytes,
        repeat=repeat,
        peak_bytes=summary.peak_bytes,
        runtime_peak_bytes=summary.peak_bytes_by_stage["runtime"],
        predicted_peak_bytes=summary.predicted_peak_bytes,
        least_feasible_bytes=summary.least_feasible_bytes,
        step_times_s=summary.step_times_s,
        predicted_step_time_s=summary.predicted_step_time_s,
        moved_bytes=sum(summary.moved_bytes_per_step.values()),
        others_share=done.others_share,
    )


@dataclass(frozen=True)
class _Done:
    """What a command printed, and the share of the processors' time that others took meanwhile."""

    output: str
    others_share: float


def _command(module: str, case: Case, folder: Path, work: Path, *settings: str) -> _Done:
    line = [sys.executable, "-m", module, *case.overrides, *settings, f"hydra.run.dir={folder}"]
    line += [f"store={work / 'store'}", f"tiers.disk={work / 'disk'}"]
    others = watch_others()
    done = subprocess.run(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    others_share = others()
    if done.returncode != 0:
        raise CommandFailedError(f"{' '.join(line[1:])} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return _Done(done.stdout, others_share)
