"""GPT-2 124M, batch 8, under tight budgets: the batch whole, and cut as the planner chooses. Whole commands.

    python -m benchmarks.vertical      # about twenty minutes; benchmarks/results/vertical.md

Budgets are shares of the least one of the whole batch. Without dropout, whose masks depend on the cut.
Losses may differ by the rounding of sums taken in another order: by `TOLERANCE` of their size. Exit
code 1 where they differ by more, a run exceeds its budget, none is cut vertically, or what `auto` chose is
slower than the whole or refused where that is not.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import Placement

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "vertical.md"
#: relative, of each loss; fp32
TOLERANCE = 1e-5
#: measured times closer than this count as equal
NOISE = 1.05
MODEL = (
    "+model=gpt2", *(f"+model.arguments.{name}_pdrop=0.0" for name in ("attn", "resid", "embd")),
    "precision=fp32", "data=random", "data.batch_size=8", "train.loss=auto", "solver.replan=never",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Finished commands of one setting; summary: None where it was refused.

    step_times_s: of all repeats, without the first step of each.
    """

    budget: int
    cut: str
    summary: dict[str, Any] | None
    slices: str = ""
    step_times_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        return median(self.step_times_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vertical",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of each run; the first does not count")
    parser.add_argument("--repeats", type=int, default=2, help="of all settings in turn")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.6, 0.8, 1.0, 1.3])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stages-vertical-") as work:
        least = _least(Path(work), options)
        budgets = [round(least * share) for share in options.shares]
        settings = [(budget, cut) for budget in budgets for cut in ("given", "auto")]
        repeats = [
            [_run(Path(work), options, budget, cut) for budget, cut in settings]
            for _ in range(options.repeats)
        ]
        runs = joined(repeats)
    problems = problems_of(runs)
    table = as_markdown(runs, problems, least, options)
    print(table)
    RESULT.write_text(table)
    return 1 if problems else 0


def _command(work: Path, options: argparse.Namespace, *settings: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "stages.run", *MODEL, f"data.seq_len={options.seq_len}", *settings]
    line += [f"steps={options.steps}", f"store={work / 'store'}", f"tiers.disk={work / 'disk'}"]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def _least(work: Path, options: argparse.Namespace) -> int:
    folder = work / "refused"
    _command(work, options, "budget=1MB", f"hydra.run.dir={folder}")
    return _refusal(folder)["least_feasible_bytes"]


def _refusal(folder: Path) -> dict[str, Any]:
    """What a refused run says of its end."""
    return json.loads((folder / "error.json").read_text())


def _run(work: Path, options: argparse.Namespace, budget: int, cut: str) -> Run:
    folder = work / f"{cut}-{budget}"
    settings = (f"budget={budget}", f"solver.micro_batches={cut}", f"hydra.run.dir={folder}")
    done = _command(work, options, *settings)
    if done.returncode == 2 and _refusal(folder)["kind"] == InfeasibleBudgetError.kind:
        return Run(budget, cut, None)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(settings)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    placement = json.loads((folder / "plan.json").read_text())["content"]["placement"]
    defaults = {field.name: field.default for field in msgspec.structs.fields(Placement)}
    slices, order = [placement.get(name, defaults[name]) for name in ("micro_batches", "micro_batch_order")]
    summary = json.loads((folder / "summary.json").read_text())
    times = tuple(summary["step_times_s"][1:])
    return Run(budget, cut, summary, f"{slices}, {order}" if slices > 1 else "1", times)


def joined(repeats: list[list[Run]]) -> list[Run]:
    """One run of each setting, with the step times of all its repeats and its largest peak."""
    found = []
    for same in zip(*repeats, strict=True):
        first, summaries = same[0], [run.summary for run in same if run.summary]
        if len(summaries) not in (0, len(same)):
            raise RuntimeError(f"{first.cut} at {first.budget}: refused in some repeats only")
        if summaries:
            peak = max(summary["peak_bytes"] for summary in summaries)
            times = tuple(time for run in same for time in run.step_times_s)
            first = replace(first, summary={**summaries[0], "peak_bytes": peak}, step_times_s=times)
        found.append(first)
    return found


def problems_of(runs: list[Run]) -> list[str]:
    """What does not hold."""
    found = [] if any(run.slices.endswith("vertical") for run in runs) else ["no run was cut vertically"]
    reference = next((run.summary for run in runs if run.summary), None)
    for run in runs:
        if run.summary is None or reference is None:
            continue
        if run.summary["peak_bytes"] > run.budget:
            found.append(f"{run.cut} at {run.budget}: the peak is above the budget")
        pairs = zip(run.summary["losses"], reference["losses"], strict=True)
        off = max(abs(mine / other - 1) for mine, other in pairs)
        if off > TOLERANCE:
            found.append(f"{run.cut} at {run.budget}: a loss is off by {off:.1e}")
    for whole, cut in zip(runs[::2], runs[1::2], strict=True):
        if whole.summary and not cut.summary:
            found.append(f"at {whole.budget}: auto was refused, the whole batch was not")
        elif whole.summary and cut.step_s > NOISE * whole.step_s:
            found.append(f"at {whole.budget}: cut {cut.step_s:.2f} s, whole {whole.step_s:.2f} s")
    return found


def as_markdown(runs: list[Run], problems: list[str], least: int, options: argparse.Namespace) -> str:
    lines = [
        "# Micro-batches",
        "",
        f"`python -m benchmarks.vertical`: GPT-2 124M, fp32, 8x{options.seq_len}, without dropout. The least "
        f"budget of the whole batch is {least / 1e6:.0f} MB. `auto` chooses number and order of the slices.",
        "",
        "| budget MB | micro_batches | slices | step s | predicted s | read MB | written MB | peak MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [f"{run.budget / 1e6:.0f}", run.cut]
        if run.summary is None:
            cells += ["refused", "", "", "", "", ""]
        else:
            moved = run.summary["moved_bytes_per_step"]
            cells += [run.slices, f"{run.step_s:.2f}", f"{run.summary['predicted_step_time_s']:.2f}"]
            cells += [f"{moved.get(name, 0) / 1e6:.0f}" for name in ("disk_read", "disk_write")]
            cells += [f"{run.summary['peak_bytes'] / 1e6:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"Losses of all runs agree to {TOLERANCE:g} of their size." if not problems else ""]
    lines += [f"- {problem}" for problem in problems]
    return re.sub(r"\n+$", "\n", "\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
