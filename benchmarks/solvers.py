"""How good plans are: every solver's step time, the certified bound, and the time that solving takes.

    python -m benchmarks.solvers                 # all cases at five budgets, about an hour on two cores
    python -m benchmarks.solvers --quick         # chains of 12 regions at two budgets
    python -m benchmarks.solvers --resume        # goes on where it was interrupted
    python -m benchmarks.solvers --only gpt2 --results /tmp/gpt2   # cases by name, several at once

Budgets are shares of the all-resident peak; where the least feasible one is more, that is taken. Exit code 1
if a criterion fails. Results: benchmarks/results/solvers.json and .md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.solver_cases import SIZES, SolverCase, made_up, traced
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.graph import Struct
from stages.solve.choice import everything_resident
from stages.solve.solvers import SOLVERS
from stages.solve.task import Task, realise

ROOT = Path(__file__).resolve().parent
SHARES = (0.3, 0.45, 0.6, 0.75, 0.9)
OTHERS = ("layerwise", "greedy_sync", "greedy_async", "milp")
#: above so many regions the greedy solvers take minutes
MOST_GREEDY = 60
#: seconds that "auto" and "milp" get, and the gap to reach: kinds of regions -> (seconds, gap)
GOALS = {"few": (10.0, 0.02), "many": (60.0, 0.05)}
#: unequal chains of so many regions or fewer have no goal
SMALL = 30
ROOMY_BYTES = 10**15


class Row(Struct, frozen=True):
    """One case at one budget; times in seconds."""

    case: str
    kinds: str
    regions: int
    share: float
    budget_bytes: int
    steps: dict[str, float]  # solver -> step time; absent: not feasible, or not asked
    solving: dict[str, float]
    bound: float

    @property
    def gap(self) -> float:
        return self.steps["auto"] / self.bound - 1

    @property
    def is_best(self) -> bool:
        return all(self.steps["auto"] <= step for step in self.steps.values())

    @property
    def meets_goal(self) -> bool:
        return (self.kinds == "many" and self.regions <= SMALL) or self.gap <= GOALS[self.kinds][1]


def measure(case: SolverCase, shares: Sequence[float], done: set[tuple[str, float]]) -> Iterator[Row]:
    open_shares = [share for share in shares if (case.name, share) not in done]
    if not open_shares:
        return
    problem = case.make()
    resident = realise(Task(problem, ROOMY_BYTES), everything_resident(problem)).simulation.peak_bytes
    has_goal = case.kinds == "few" or len(problem.regions) > SMALL
    seconds = GOALS[case.kinds if has_goal else "few"][0]
    for share in open_shares:
        task = Task(problem, int(resident * share), time_limit_s=seconds)
        least = _least(task)
        if least is not None:
            task = Task(problem, least, time_limit_s=seconds)
        yield _row(case, share, task)


def _least(task: Task) -> int | None:
    """The least feasible budget where the task's is under it."""
    try:
        SOLVERS["auto"](Task(task.problem, 1, time_limit_s=0.1))
    except InfeasibleBudgetError as refusal:
        least = refusal.least_feasible_bytes
        return least if least is not None and least > task.budget_bytes else None
    return None


def _row(case: SolverCase, share: float, task: Task) -> Row:
    regions = len(task.problem.regions)
    steps: dict[str, float] = {}
    solving: dict[str, float] = {}
    bound = 0.0
    for solver in (*OTHERS, "auto"):
        if solver.startswith("greedy") and regions > MOST_GREEDY:
            continue
        started = time.monotonic()
        try:
            solution = SOLVERS[solver](task)
        except InfeasibleBudgetError:
            continue
        solving[solver] = time.monotonic() - started
        steps[solver] = solution.simulation.step_ns / 1e9
        bound = max(bound, solution.lower_bound_ns / 1e9)
    return Row(case.name, case.kinds, regions, share, task.budget_bytes, steps, solving, bound)


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Step time in seconds by solver, certified bound and gap", title_justify="left")
    for column in ("case", "share", *OTHERS, "auto", "bound", "gap", "solved in", "best", "goal"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    steps = [f"{row.steps[solver]:.4g}" if solver in row.steps else "-" for solver in (*OTHERS, "auto")]
    return [
        row.case,
        f"{row.share:.0%}",
        *steps,
        f"{row.bound:.4g}",
        f"{row.gap:.1%}",
        f"{row.solving['auto']:.1f} s",
        "yes" if row.is_best else "NO",
        "yes" if row.meets_goal else "NO",
    ]


def summary_lines(rows: Sequence[Row]) -> list[str]:
    best = sum(row.is_best for row in rows)
    lines = [f"auto is as fast as any other solver in {best} of {len(rows)}"]
    for kinds, (seconds, goal) in GOALS.items():
        asked = [row for row in rows if row.kinds == kinds and (kinds == "few" or row.regions > SMALL)]
        met = sum(row.meets_goal for row in asked)
        lines.append(f"{kinds} kinds: gap of at most {goal:.0%} with {seconds:.0f} s: {met} of {len(asked)}")
    return lines


def as_markdown(rows: Sequence[Row]) -> str:
    header = ["case", "budget / resident peak", *OTHERS, "auto", "bound", "gap", "solved in", "best", "goal"]
    lines = ["# Solvers: step time in seconds, bound and gap", "", "`python -m benchmarks.solvers`", ""]
    lines += [f"- {line}" for line in summary_lines(rows)]
    lines += ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solvers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="chains of 12 regions at two budgets")
    parser.add_argument("--resume", action="store_true", help="keep the rows that are there")
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--work", type=Path, default=ROOT.parent / "outputs" / "solvers")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    options = parser.parse_args(arguments)
    kept = options.results / "solvers.json"
    rows = msgspec.json.decode(kept.read_bytes(), type=list[Row]) if options.resume and kept.exists() else []
    shares = [0.45, 0.75] if options.quick else options.shares
    cases = list(made_up((12,) if options.quick else tuple(options.sizes)))
    cases += [] if options.quick else traced(options.work)
    cases = [case for case in cases if options.only in case.name]
    console = Console(width=200)
    for case in cases:
        for row in measure(case, shares, {(row.case, row.share) for row in rows}):
            rows.append(row)
            console.print("  ".join(cells(row)))
            if not options.quick:
                write(rows, options.results)
    console.print(as_table(rows))
    for line in summary_lines(rows):
        console.print(line)
    return 0 if all(row.is_best and row.meets_goal for row in rows) else 1


def write(rows: Sequence[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "solvers.json").write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    (folder / "solvers.md").write_text(as_markdown(rows))


if __name__ == "__main__":
    sys.exit(main())
