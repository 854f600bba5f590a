"""Kills a training run again and again, and holds what comes out against a run that nobody disturbed.

    python -m benchmarks.endurance             # 300 steps, 10 kills; benchmarks/results/endurance.md
    python -m benchmarks.endurance --steps 24 --kills 2 --every 5 --out endurance.md

A small GPT-2 with the real vocabulary and few tokens a step, so that weights and optimizer state bind,
trains at budgets under what it needs in memory, with a checkpoint every 20 steps. At random moments its
processes get `kill -9` or SIGTERM; each time it is resumed under another random budget and solver. What must
hold: the loss curve and the final weights are bitwise those of the undisturbed run, all in memory; the peak
stays within each run's budget; a killed run loses at most the steps since its last checkpoint; the scratch
folder is empty at the end. Exit code 1 if anything does not.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "endurance.md"
MODEL = (
    "+model=gpt2", "model.arguments.n_layer=8", "model.arguments.n_embd=384", "model.arguments.n_head=6",
    "data=random", "data.batch_size=2", "data.seq_len=64", "solver.replan=never",
    "solver.time_limit_s=3",
)  # fmt: skip
SOLVERS = ("greedy_async", "greedy_sync", "layerwise", "milp", "auto")
_END_S = 60


@dataclass(frozen=True)
class Kill:
    """How a run is ended: once it has made `step`, or `after_s` seconds after its start where `step` is 0."""

    number: signal.Signals
    whole: bool  # the composing process gets it, else the stage's own
    step: int
    after_s: float


@dataclass(frozen=True)
class Run:
    """A row of the table; bytes."""

    budget: int
    solver: str
    resumed_at: int
    last_step: int
    ended: str
    code: int
    peak: int
    saved: int
    moved: int  # per step, as planned


class Endurance:
    """The runs of one job in a folder of their own."""

    def __init__(self, folder: Path, steps: int, every: int) -> None:
        self.folder, self.steps = folder, steps
        self.checkpoints = folder / "checkpoints"
        self._every = every
        self._count = 0
        self.problems: list[str] = []

    def train(self, budget: int, solver: str, name: str, kill: Kill | None = None) -> Run:
        """One run to its end, however that comes."""
        self._count += 1
        out = self.folder / f"run-{self._count}"
        line = [sys.executable, "-m", "stages.run", *MODEL, f"steps={self.steps}", f"budget={budget}"]
        line += [
            f"solver={solver}",
            f"store={self.folder / 'store'}",
            f"tiers.disk={self.folder / 'scratch'}",
        ]
        line += [f"hydra.run.dir={out}", f"export.final={self.folder / name}"]
        resumed_at = 0
        if name != "undisturbed":
            line += [f"checkpoint.every={self._every}", f"checkpoint.dir={self.checkpoints}"]
            resumed_at = self.newest()
            line += [f"resume={self.checkpoints}"] if resumed_at else []
        code, last = self._watch(line, kill)
        ended = (
            "finished" if kill is None else f"{kill.number.name} to the {'job' if kill.whole else 'stage'}"
        )
        peak, moved = _peak(out, resumed_at), _moved(out)
        return Run(budget, solver, resumed_at, last, ended, code, peak, self.newest(), moved)

    def _watch(self, line: list[str], kill: Kill | None) -> tuple[int, int]:
        """Exit code, and the last step that was reported."""
        process = subprocess.Popen(
            line,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        timer = None
        if kill is not None and not kill.step:
            timer = threading.Timer(kill.after_s, _send, (process.pid, kill))
            timer.start()
        last, said = 0, []
        for text in process.stdout:
            said.append(text)
            if match := re.match(r"step (\d+)/", text):
                last = int(match.group(1))
                if kill is not None and kill.step and last == kill.step:
                    time.sleep(kill.after_s)
                    _send(process.pid, kill)
        # the output ends when the last process that could write to it has ended
        code = process.wait(timeout=_END_S)
        if timer is not None:
            timer.cancel()
        expected = {0} if kill is None else {-kill.number, 128 + kill.number, 0}
        if code not in expected:
            self.problems.append(f"run {self._count} ended with exit code {code}: {''.join(said[-5:])}")
        return code, last

    def newest(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        if not self.checkpoints.is_dir():
            return 0
        return max((int(path.name[5:]) for path in self.checkpoints.glob("step-*")), default=0)


def _send(pid: int, kill: Kill) -> None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid if kill.whole or not children else int(children[0]), kill.number)
    except (FileNotFoundError, ProcessLookupError):
        return  # it has ended by itself


def _peak(out: Path, resumed_at: int) -> int:
    """The largest of the run's own steps."""
    file = out / "losses.csv"
    if not file.exists():
        return 0
    rows = [row for row in csv.DictReader(file.open()) if row["peak_bytes"]]
    return max((int(row["peak_bytes"]) for row in rows if int(row["step"]) > resumed_at), default=0)


def _moved(out: Path) -> int:
    """Bytes that the run's plan reads and writes in a step; 0 for a run that ended before it had a plan."""
    file = out / "plan.json"
    if not file.exists():
        return 0
    return sum(json.loads(file.read_text())["content"]["prediction"]["moved_bytes"].values())


def _curve(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / "losses.csv").open() as file:
        return [(row["step"], row["loss"], row["grad_norm"]) for row in csv.DictReader(file)]


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def endure(folder: Path, steps: int, every: int, kills: int, seed: int) -> tuple[list[Run], list[str]]:
    """The runs, and what went wrong in them."""
    job, draw = Endurance(folder, steps, every), random.Random(seed)
    # `auto` keeps all in memory there, and says the least budget of any plan; `resident` would say its own
    first = job.train(4 * 10**9, "auto", "undisturbed")
    if first.code:
        return [first], job.problems
    summary = json.loads((folder / "run-1" / "summary.json").read_text())
    least, most = summary["least_feasible_bytes"], summary["predicted_peak_bytes"]
    runs = [first]
    if first.moved:
        job.problems.append("the undisturbed run was not all in memory")
    for index in range(kills + 1):
        budget = int(least * 1.02 + draw.random() * 0.7 * max(0, most - least * 1.02))
        kill = _draw_kill(draw, index, kills, steps, job.newest()) if index < kills else None
        runs.append(job.train(budget, draw.choice(SOLVERS), "endured", kill))
        print(_row(len(runs), runs[-1]), flush=True)
        if runs[-1].code == 0:
            break
    judge(job, runs, every)
    return runs, job.problems


def _draw_kill(draw: random.Random, index: int, kills: int, steps: int, newest: int) -> Kill:
    """Every fifth strikes while the job starts; the others are spread over the steps."""
    number = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM))
    whole = draw.random() < 0.5
    if index % 5 == 3:
        return Kill(number, whole, 0, draw.uniform(0.5, 12))
    share = steps // kills
    step = max(newest + 1, index * share + draw.randint(1, share))
    return Kill(number, whole, min(step, steps - 1), draw.uniform(0, 0.4))


def judge(job: Endurance, runs: list[Run], every: int) -> None:
    """Adds to the job's problems what does not hold; the first run is the undisturbed one."""
    problems, folder = job.problems, job.folder
    for index, run in enumerate(runs, start=1):
        if run.peak > run.budget:
            problems.append(f"run {index} took {run.peak} bytes of {run.budget}")
        if index > 1 and run.peak and not run.moved:
            problems.append(f"run {index} moved nothing: its budget of {run.budget} bytes was not tight")
        lost = run.last_step - max(run.saved, run.resumed_at)
        if run.code and lost > every:
            problems.append(f"run {index} lost {lost} steps")
    if runs[-1].code == 0:
        last = f"run-{len(runs)}"
        if _curve(folder / "run-1") != _curve(folder / last):
            problems.append("the loss curve is not that of the undisturbed run")
        if _digest(folder / "undisturbed") != _digest(folder / "endured"):
            problems.append("the final weights are not those of the undisturbed run")
        peak = json.loads((folder / last / "summary.json").read_text())["peak_bytes"]
        if peak > runs[-1].budget:
            problems.append(f"the last run took {peak} bytes of {runs[-1].budget}")
    if left := [path.name for path in (folder / "scratch").iterdir()]:
        problems.append(f"the scratch folder holds {', '.join(left)}")
    if left := [path.name for path in job.checkpoints.iterdir() if path.name.startswith(".")]:
        problems.append(f"the checkpoints' folder holds {', '.join(left)}")


_HEADER = "| run | budget, MB | solver | from step | to step | ended by | newest checkpoint then | peak, MB "
_HEADER += "| moved per step, MB |"


def _row(number: int, run: Run) -> str:
    peak = f"{run.peak / 1e6:.1f}" if run.peak else "–"
    cells = (number, f"{run.budget / 1e6:.1f}", run.solver, run.resumed_at, run.last_step, run.ended)
    moved = f"{run.moved / 1e6:.0f}" if run.peak else "–"
    return f"| {' | '.join(map(str, cells))} | {run.saved} | {peak} | {moved} |"


def table(runs: list[Run], problems: list[str], steps: int, every: int, seconds: float) -> str:
    """The result as Markdown."""
    kills = len(runs) - 2
    verdict = (
        f"Loss curve, gradient norms and final weights are bitwise those of run 1, which nobody disturbed; "
        f"every step stayed within its run's budget; no run lost more than {every} steps; the scratch folder "
        f"was empty at the end."
        if not problems
        else "\n".join(["Went wrong:", *(f"- {problem}" for problem in problems)])
    )
    lines = [
        "# Endurance", "",
        f"`python -m benchmarks.endurance`: {steps} steps, a checkpoint every {every}, {kills} kills, "
        f"{seconds / 60:.1f} minutes in all.", "",
        verdict, "",
        _HEADER, "|---" * 9 + "|",
        *(_row(index, run) for index, run in enumerate(runs, start=1)), "",
    ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    parsed = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="endurance-") as folder:
        runs, problems = endure(Path(folder), parsed.steps, parsed.every, parsed.kills, parsed.seed)
    text = table(runs, problems, parsed.steps, parsed.every, time.monotonic() - begin)
    print(text)
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    parsed.out.write_text(text)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
