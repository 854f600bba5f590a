"""The solver test of ColossalAI's auto-offload, planned for the kind of GPU that it ran on.

    python -m benchmarks.ancestor

Its two models (a GPT-2 of two layers and a BERT of four, both 8192 wide), 4000 MB on the device, fp16;
every solver, through the roofline of `hardware=a100-40`. Needs neither the GPU nor the weights. Exit code 1
if a planned peak is over the budget, or greedy_sync >= greedy_async >= auto fails in step time. Results:
benchmarks/results/ancestor.md.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stages import cli
from stages.artifacts.errors import InfeasibleBudgetError
from stages.config import SOLVERS, RunConfig, format_size, parse_size
from stages.preconditions import for_hardware
from stages.solve import stage as solve
from stages.trace import stage as trace
from stages.trace.profile.roofline import stage as roofline

BUDGET = "4000MB"
#: model -> sizes of its batch in that test
MODELS = {
    "ancestor-gpt2": ["data.batch_size=64", "data.seq_len=8"],
    "ancestor-bert": ["data.batch_size=64", "data.seq_len=64"],
}
#: no slower than the one before, each
ORDER = ("greedy_sync", "greedy_async", "auto")
RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = ("model", "solver", "step", "bound", "peak", "least feasible budget", "solved in")
_NS_PER_S = 1e9


@dataclass(frozen=True)
class Result:
    """One solver on one model. step_s: None where the budget is too small for the solver, and then
    least_feasible_bytes says what it needs; bound_s: None where it gives none."""

    model: str
    solver: str
    step_s: float | None
    peak_bytes: int | None
    least_feasible_bytes: int
    solve_s: float | None
    bound_s: float | None = None


def configuration(model: str) -> RunConfig:
    arguments = [f"model={model}", "hardware=a100-40", f"budget={BUDGET}", "precision=fp16", *MODELS[model]]
    return for_hardware(cli.compose(arguments), "solve")


def results(model: str) -> list[Result]:
    """Every solver's plan of `model`."""
    config = configuration(model)
    graph = trace.run(config)
    costs = roofline.run(config, graph)
    found = []
    for solver in SOLVERS:
        chosen = dataclasses.replace(config, solver=dataclasses.replace(config.solver, name=solver))
        try:
            plan, _ = solve.run(chosen, graph, costs)
        except InfeasibleBudgetError as refusal:
            found.append(Result(model, solver, None, None, refusal.least_feasible_bytes or 0, None))
            continue
        prediction = plan.prediction
        found.append(
            Result(
                model,
                solver,
                prediction.step_ns / _NS_PER_S,
                prediction.peak_bytes,
                prediction.least_feasible_bytes,
                plan.solve_ns / _NS_PER_S,
                prediction.lower_bound_ns / _NS_PER_S or None,
            )
        )
    return found


def cells(item: Result) -> list[str]:
    return [
        item.model,
        item.solver,
        "refused" if item.step_s is None else f"{item.step_s:.3f} s",
        "" if item.bound_s is None else f"{item.bound_s:.3f} s",
        "" if item.peak_bytes is None else format_size(item.peak_bytes),
        format_size(item.least_feasible_bytes),
        "" if item.solve_s is None else f"{item.solve_s:.1f} s",
    ]


def print_results(found: list[Result], console: Console | None = None) -> None:
    table = Table(title=f"{BUDGET} on an A100 40 GB, fp16 (predicted)", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "solver") else "right")
    for item in found:
        table.add_row(*cells(item))
    (console or Console()).print(table)


def failures(found: Sequence[Result]) -> list[str]:
    """What the plans do not keep."""
    limit = parse_size(BUDGET, "budget")
    said = [
        f"{item.model}, {item.solver}: peak over the budget"
        for item in found
        if (item.peak_bytes or 0) > limit
    ]
    for model in MODELS:
        steps = {item.solver: item.step_s for item in found if item.model == model}
        times = [steps[solver] for solver in ORDER]
        if None in times or times != sorted(times, key=lambda time: -(time or 0.0)):
            said.append(f"{model}: {' >= '.join(ORDER)} fails: {times}")
    return said


def as_markdown(found: Sequence[Result]) -> str:
    lines = [f"# {BUDGET} on an A100 40 GB, fp16 (predicted)", "", "`python -m benchmarks.ancestor`", ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(item)) + " |" for item in found]
    return "\n".join(lines) + "\n"


def main() -> int:
    found = [result for model in MODELS for result in results(model)]
    print_results(found)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "ancestor.md").write_text(as_markdown(found))
    failed = failures(found)
    for line in failed:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
