"""The comparison itself: everybody in turn, then everybody again."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.rivals import record as records
from benchmarks.rivals.bounds import bound_of
from benchmarks.rivals.checks import AT_DEEPSPEED, DEEPSPEED_LIMITED, name_at
from benchmarks.rivals.contenders import Contender, deepspeed, loops, ours, run_folder
from benchmarks.rivals.limits import smallest_limit
from benchmarks.rivals.record import Limit, Record
from benchmarks.rivals.running import Run, run_once
from benchmarks.rivals.workload import ROOT, Allocator, Workload

#: the share of M at which logits do not fit whole; there the planner may cut the batch
_CUT = ("solver.micro_batches=auto",)
#: what a search for the smallest limit begins with: the peak without one, and room for other processes
_ROOM_BYTES = 256 << 20


@dataclass(frozen=True)
class Turn:
    """One run that is due. limit_bytes: of its memory cgroup; 0: none."""

    contender: Contender
    limit_bytes: int = 0


@dataclass(frozen=True)
class Setting:
    """What a comparison is made of. deepspeed_python: empty where it is not installed.

    shares: Of M, that are our budgets.
    """

    workload: Workload
    allocator: Allocator
    work: Path
    steps: int
    deepspeed_python: str
    shares: tuple[float, float, float]
    console: Console

    @property
    def record_path(self) -> Path:
        return self.work / "record.json"


def compare(setting: Setting, record: Record, repeats: int) -> None:
    """Runs what `record` has not got yet, and adds it there."""
    record.allocator = setting.allocator.name
    eager = loops(setting.allocator)[0]
    _once(setting, record, Turn(eager), 0)
    turns = turns_of(setting, record)
    record.what = {turn.contender.name: turn.contender.what for turn in turns}
    for turn in turns:
        if turn.contender.name.startswith("ours"):
            _prepare(setting, turn)
    for repeat in range(repeats):
        for turn in turns:
            _once(setting, record, turn, repeat)
    for turn in turns:
        folder = run_folder(setting.work, turn.contender.name)
        if turn.contender.name.startswith("ours") and (folder / "summary.json").exists():
            bound = bound_of(folder)
            if bound.disk_s > 0:
                record.bounds[turn.contender.name] = bound
    records.save(record, setting.record_path)


def turns_of(setting: Setting, record: Record) -> list[Turn]:
    """Everybody's run, rivals beside what they are held against."""
    peak = record.peak_of_eager
    found = [Turn(contender) for contender in loops(setting.allocator) if contender.name != "mapped"]
    budgets = {name_at(share): round(share * peak) for share in setting.shares}
    full, half, tight = budgets
    found.insert(_after(found, "masters-in-backward"), Turn(ours(full, budgets[full])))
    found.append(Turn(ours(half, budgets[half])))
    mapped = next(contender for contender in loops(setting.allocator) if contender.name == "mapped")
    found += [Turn(item, budgets[tight]) for item in (mapped, ours(tight, budgets[tight], _CUT))]
    if not setting.deepspeed_python:
        return found
    rival = deepspeed(setting.deepspeed_python, setting.allocator)
    found.append(Turn(rival))
    limit = record.limit_of("deepspeed")
    if limit is not None and limit.bytes:
        limited = dataclasses.replace(rival, name=DEEPSPEED_LIMITED)
        found += [Turn(item, limit.bytes) for item in (limited, ours(AT_DEEPSPEED, limit.bytes))]
    return found


def _after(turns: list[Turn], name: str) -> int:
    return 1 + next(index for index, turn in enumerate(turns) if turn.contender.name == name)


def _prepare(setting: Setting, turn: Turn) -> None:
    """Plans ahead, so that no run is timed beside a trace or a profile; a refusal is the run's to report."""
    command = turn.contender.command(setting.workload, setting.work, setting.steps)
    for stage in ("stages.trace", "stages.trace.profile", "stages.solve"):
        line = [stage if part == "stages.run" else part for part in command]
        subprocess.run(line, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _once(setting: Setting, record: Record, turn: Turn, repeat: int) -> None:
    key = (turn.contender.name, repeat, turn.limit_bytes)
    if any((run.contender, run.repeat, run.limit_bytes) == key for run in record.runs):
        return
    run = run_once(turn.contender, setting.workload, setting.work, setting.steps, repeat, turn.limit_bytes)
    tell(setting.console)(run)
    record.runs.append(run)
    records.save(record, setting.record_path)


def search_limits(setting: Setting, record: Record, names: list[str]) -> None:
    """The smallest memory cgroup of each contender named that has not been searched yet."""
    known = {contender.name: contender for contender in loops(setting.allocator)}
    if setting.deepspeed_python:
        known["deepspeed"] = deepspeed(setting.deepspeed_python, setting.allocator)
    for name in names:
        if record.limit_of(name) is not None or name not in known:
            continue
        free = run_once(known[name], setting.workload, setting.work, 2)
        tell(setting.console)(free)
        found = None
        if not free.failure:
            most = free.peak_bytes + _ROOM_BYTES
            found = smallest_limit(known[name], setting.workload, setting.work, most, tell(setting.console))
        record.limits.append(Limit(name, found))
        records.save(record, setting.record_path)


def tell(console: Console) -> Callable[[Run], None]:
    def show(run: Run) -> None:
        limit = f" in a cgroup of {run.limit_bytes / 1e6:.0f} MB" if run.limit_bytes else ""
        steps = ", ".join(f"{time_s:.2f}" for time_s in run.step_times_s)
        result = run.failure or f"peak {run.peak_bytes / 1e6:.0f} MB, steps of {steps} s"
        console.print(f"{run.contender}{limit}: {result} (others {run.others_share:.0%})", highlight=False)

    return show
