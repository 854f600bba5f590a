"""Judging and showing the runs of `benchmarks.prediction`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
from rich.table import Table

from benchmarks.prediction_cases import Run

PEAK_TOLERANCE = 0.05
TIME_TOLERANCE = 0.15
#: of the rows, how many must be within the tolerance of time
TIME_QUOTA = 0.9

COLUMNS = (
    "case", "budget MB", "predicted MB", "measured MB", "error", "predicted s", "measured s", "error",
    "steps", "moved MB", "others",
)  # fmt: skip


class Row(msgspec.Struct, frozen=True):
    """All repeats of one case at one budget. The peak is the largest, the time the median."""

    case: str
    budget_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int  # of the training process
    largest_peak_bytes: int  # of any stage's process
    predicted_step_s: float
    measured_step_s: float
    step_times_s: list[float]
    moved_bytes: int
    others_share: float

    @property
    def peak_error(self) -> float:
        """Of the measured peak, against the predicted one."""
        return self.measured_peak_bytes / self.predicted_peak_bytes - 1

    @property
    def time_error(self) -> float:
        """Of the predicted time, against the measured one."""
        return self.predicted_step_s / self.measured_step_s - 1


@dataclass(frozen=True)
class Criteria:
    met: bool
    lines: list[str]


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row per case and budget, in the order in which they were first run."""
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.case, run.budget_bytes), []).append(run)
    return [_row(repeats) for repeats in groups.values()]


def _row(repeats: Sequence[Run]) -> Row:
    times = [time_s for run in repeats for time_s in run.step_times_s[1:]]
    return Row(
        case=repeats[0].case,
        budget_bytes=repeats[0].budget_bytes,
        predicted_peak_bytes=repeats[0].predicted_peak_bytes,
        measured_peak_bytes=max(run.runtime_peak_bytes for run in repeats),
        largest_peak_bytes=max(run.peak_bytes for run in repeats),
        predicted_step_s=repeats[0].predicted_step_time_s,
        measured_step_s=median(times),
        step_times_s=times,
        moved_bytes=repeats[0].moved_bytes,
        others_share=max(run.others_share for run in repeats),
    )


def judge(rows: Sequence[Row], *, least_rows: int) -> Criteria:
    """Peak within 5 % and never above the budget, in all; time within 15 %, in 90 %."""
    near = sum(abs(row.peak_error) <= PEAK_TOLERANCE for row in rows)
    inside = sum(row.largest_peak_bytes <= row.budget_bytes for row in rows)
    timely = sum(abs(row.time_error) <= TIME_TOLERANCE for row in rows)
    count = len(rows)
    checks = [
        (count >= least_rows, f"{count} runs; at least {least_rows}"),
        (near == count, f"measured peak within {PEAK_TOLERANCE:.0%} of predicted in {near} of {count}; all"),
        (inside == count, f"measured peak inside the budget in {inside} of {count}; all"),
        (
            timely >= TIME_QUOTA * count,
            f"step time within {TIME_TOLERANCE:.0%} in {timely} of {count}; {TIME_QUOTA:.0%}",
        ),
    ]
    lines = [f"{'met' if met else 'NOT MET'}: {what} required" for met, what in checks]
    return Criteria(all(met for met, _ in checks), lines)


def cells(row: Row) -> list[str]:
    return [
        row.case,
        f"{row.budget_bytes / 1e6:.0f}",
        f"{row.predicted_peak_bytes / 1e6:.0f}",
        f"{row.measured_peak_bytes / 1e6:.0f}",
        f"{row.peak_error:+.1%}",
        f"{row.predicted_step_s:.2f}",
        f"{row.measured_step_s:.2f}",
        f"{row.time_error:+.0%}",
        " ".join(f"{time_s:.2f}" for time_s in row.step_times_s),
        f"{row.moved_bytes / 1e6:.0f}",
        f"{row.others_share:.0%}",
    ]


def as_table(rows: Sequence[Row]) -> Table:
    table = Table(title="Predicted and measured")
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        good = abs(row.time_error) <= TIME_TOLERANCE and abs(row.peak_error) <= PEAK_TOLERANCE
        table.add_row(*cells(row), style="" if good else "yellow")
    return table


def as_markdown(rows: Sequence[Row], criteria: Criteria) -> str:
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    lines = [
        "# Predicted and measured",
        "",
        f"`python -m benchmarks.prediction` on {os.cpu_count()} cores and {memory_gb:.0f} GB of memory. Time",
        "is the median over the steps listed (the first of each run left out). Errors: of the measured peak",
        "against the predicted one, of the predicted time against the measured one. Others: the largest",
        "share of the processors' time that other processes took during a run.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
        "",
        *(f"- {line}" for line in criteria.lines),
        "",
    ]  # fmt: skip
    return "\n".join(lines)
