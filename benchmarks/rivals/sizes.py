"""This tool's cost against the model's size, at one budget: models up to GPT-2 XL."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.rivals.bounds import Bound, bound_of
from benchmarks.rivals.checks import STREAMED_FACTOR, Check, streamed_check
from benchmarks.rivals.contenders import our_command, ours, run_folder
from benchmarks.rivals.running import Run, run_once
from benchmarks.rivals.workload import ROOT, Workload
from stages.artifacts import envelope
from stages.artifacts.graph import RegionGraph
from stages.artifacts.summary import Summary

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
LARGEST = MODELS[-1]
#: time per parameter: largest over smallest, once streaming
SIZE_FACTOR = 1.3
PLANNING_S = 15.0
#: fp32 masters and two moments
_STATE_BYTES_PER_PARAMETER = 12


class Sized(msgspec.Struct, frozen=True):
    """One model's run and what it moved. planning_s: of the solve stage alone."""

    model: str
    run: Run
    parameters: int = 0
    read_bytes: int = 0
    planning_s: float = 0.0
    bound: Bound | None = None

    @property
    def streams(self) -> bool:
        """Whether its optimizer state comes from disk in each step; smaller models keep a part of it."""
        return self.read_bytes >= _STATE_BYTES_PER_PARAMETER * self.parameters

    @property
    def s_per_billion(self) -> float:
        """Seconds of a step per billion parameters."""
        return median(self.run.counted_s) * 1e9 / self.parameters


def measure(model: str, precision: str, budget_bytes: int, steps: int, work: Path) -> Sized:
    """Plans and trains one model, batch 1x256, inside its budget."""
    workload = Workload(model, precision, batch_size=1, seq_len=256)
    name = f"{model} at {budget_bytes / 1e6:.0f} MB"
    # so that the run's own planning is what is timed, and nothing before it
    prepare = our_command("stages.trace.profile", workload, work, f"{name} profile", budget_bytes, steps)
    subprocess.run(prepare, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    run = run_once(ours(name, budget_bytes), workload, work, steps)
    if run.failure:
        return Sized(model, run)
    folder = run_folder(work, name)
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    graph = envelope.load(folder / "graph.json", RegionGraph)
    return Sized(
        model=model,
        run=run,
        parameters=sum(_elements(item.spec.shape) for item in graph.parameters if item.requires_grad),
        read_bytes=summary.moved_bytes_per_step.get("disk_read", 0),
        planning_s=summary.solve_time_s,
        bound=bound_of(folder),
    )


def _elements(shape: Sequence[object]) -> int:
    return math.prod(int(str(size)) for size in shape)


def checks_of(found: Sequence[Sized]) -> list[Check]:
    """Time per parameter, planning time, every step against its bound, the largest against its disk."""
    checks = [_even(found)] if len(found) > 1 else []
    for item in found:
        taken = None if item.run.failure else item.planning_s
        what = f"{item.model}: seconds of planning"
        checks.append(Check(what, PLANNING_S, taken, at_most=True, note=item.run.failure))
        checks += _against_bounds(item)
    return checks


def _even(found: Sequence[Sized]) -> Check:
    costs = {item.model: item.s_per_billion for item in found if not item.run.failure and item.streams}
    what = f"seconds per parameter of {', '.join(costs) or 'streaming models'}: most / least"
    rest = ", ".join(item.model for item in found if not item.run.failure and not item.streams)
    note = f"{rest}: a part of the state stays in memory" if rest else ""
    ratio = max(costs.values()) / min(costs.values()) if len(costs) > 1 else None
    return Check(what, SIZE_FACTOR, ratio, at_most=True, note=note)


def _against_bounds(item: Sized) -> list[Check]:
    if item.bound is None:
        return []
    step_s = item.s_per_billion * item.parameters / 1e9
    found = [streamed_check(item.model, step_s, item.bound)]
    if item.model == LARGEST:
        what = f"{item.model}: step / what its bytes take on the disk"
        found.append(Check(what, STREAMED_FACTOR, step_s / item.bound.disk_s, at_most=True))
    return found
