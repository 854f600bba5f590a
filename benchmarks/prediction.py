"""Whether what the plan predicts is what happens: peak memory and step time, over models and budgets.

    python -m benchmarks.prediction                # 24 runs: each model and precision at four budgets
    python -m benchmarks.prediction --full         # 48 runs: both batch sizes for each
    python -m benchmarks.prediction --quick        # one model on a short sequence, to try it out
    python -m benchmarks.prediction --resume       # goes on where it was interrupted

Every run is the real job, `python -m stages.run`. Budgets of a case run in turn, all of them before
any is repeated, so that a slow drift of the machine falls on all. The first step of each run, which
makes optimizer state and maps memory, does not count. Runs that other processes disturbed are
repeated. Exit code 1 if a criterion fails. Results: benchmarks/results/prediction.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.prediction_cases import (
    MODELS,
    MOST_TRIES,
    QUIET_SHARE,
    ROOT,
    Case,
    Run,
    budgets_of,
    cases,
    run,
)
from benchmarks.prediction_table import Criteria, Row, as_markdown, as_table, judge, rows_of
from stages.config import format_size

RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console()
    runs = _finished(options.work / "runs.jsonl", resume=options.resume)
    chosen = _chosen(options)
    budgets: dict[str, list[int]] = {}
    for number, case in enumerate(chosen, start=1):
        console.print(f"case {number} of {len(chosen)}: {case.name}")
        budgets[case.name] = budgets_of(case, options.work)
        console.print(f"  budgets {', '.join(format_size(size) for size in budgets[case.name])}")
        for repeat in range(options.repeats):
            for budget in budgets[case.name]:
                _once(case, budget, repeat, options, runs, console)
    rows = rows_of([found for found in runs if found.budget_bytes in budgets.get(found.case, ())])
    criteria = judge(rows, least_rows=1 if options.quick else 24)
    console.print(as_table(rows))
    for line in criteria.lines:
        console.print(line)
    if not options.quick:
        _write(rows, criteria, options.results)
    return 0 if criteria.met else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prediction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], metavar="ROWS")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each budget")
    parser.add_argument("--steps", type=int, default=3, help="of each run, the first of which does not count")
    parser.add_argument("--full", action="store_true", help="both batch sizes for each model and precision")
    parser.add_argument("--quick", action="store_true", help="one case, nothing is written to the results")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are there")
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "prediction", help="scratch folder")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2: the first step does not count")
    options.work = options.work.absolute()
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def _chosen(options: argparse.Namespace) -> list[Case]:
    if options.quick:
        return [Case(options.models[0], options.precisions[0], options.batches[0], seq_len=128)]
    return cases(options.models, options.precisions, options.batches, full=options.full)


def _once(
    case: Case,
    budget: int,
    repeat: int,
    options: argparse.Namespace,
    runs: list[Run],
    console: Console,
) -> None:
    """Runs a job unless it has been run; again while others disturb it, and the quietest one counts."""
    if any((one.case, one.budget_bytes, one.repeat) == (case.name, budget, repeat) for one in runs):
        return
    tries = []
    while len(tries) < MOST_TRIES and not any(one.others_share <= QUIET_SHARE for one in tries):
        tries.append(run(case, budget, repeat, options.steps, options.work))
        last = tries[-1]
        console.print(
            f"  {format_size(budget)}, repeat {repeat + 1}: predicted {last.predicted_step_time_s:.2f} s, "
            f"steps of {', '.join(f'{time_s:.2f}' for time_s in last.step_times_s)} s, "
            f"others took {last.others_share:.0%} of the processors"
        )
    best = min(tries, key=lambda one: one.others_share)
    # memory does not depend on noise: the largest peak of all tries counts
    peak = max(one.peak_bytes for one in tries)
    runtime_peak = max(one.runtime_peak_bytes for one in tries)
    runs.append(msgspec.structs.replace(best, peak_bytes=peak, runtime_peak_bytes=runtime_peak))
    with (options.work / "runs.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(runs[-1]) + b"\n")


def _finished(path: Path, *, resume: bool) -> list[Run]:
    if not resume:
        path.unlink(missing_ok=True)
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in path.read_bytes().splitlines()]


def _write(rows: list[Row], criteria: Criteria, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"rows": rows, "criteria": criteria.lines, "met": criteria.met}
    (folder / "prediction.json").write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
    (folder / "prediction.md").write_text(as_markdown(rows, criteria))


if __name__ == "__main__":
    sys.exit(main())
