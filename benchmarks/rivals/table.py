"""Showing a comparison: in the terminal and as Markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.rivals.checks import Check, Row, rows_of
from benchmarks.rivals.record import Record
from benchmarks.rivals.sizes import Sized

ROW_COLUMNS = (
    "run",
    "step s",
    "steps s",
    "peak MB",
    "of M",
    "cgroup limit MB",
    "smallest limit MB",
    "others",
)
CHECK_COLUMNS = ("check", "asked", "got", "met", "note")
SIZE_COLUMNS = (
    "model",
    "step s",
    "s per 10^9 parameters",
    "planning s",
    "peak MB",
    "read MB",
    "disk bound s",
)

Cells = list[list[str]]


def row_cells(record: Record) -> Cells:
    return [_row(row, record) for row in rows_of(record.runs).values()]


def _row(row: Row, record: Record) -> list[str]:
    limit = record.limit_of(row.contender)
    found = "" if limit is None else "none" if limit.bytes is None else _mb(limit.bytes)
    share = f"{row.peak_bytes / record.peak_of_eager:.2f}" if record.peak_of_eager else ""
    return [
        row.contender,
        row.failure if row.step_s is None else f"{row.step_s:.2f}",
        " ".join(f"{time_s:.2f}" for time_s in row.step_times_s),
        _mb(row.peak_bytes),
        share if row.peak_bytes else "",
        _mb(row.limit_bytes),
        found,
        f"{row.others_share:.0%}",
    ]


def check_cells(checks: Iterable[Check]) -> Cells:
    return [
        [
            check.what,
            f"{'≤' if check.at_most else '≥'} {check.asked:g}",
            "not measured" if check.got is None else f"{check.got:.2f}",
            "" if check.met is None else "yes" if check.met else "NO",
            check.note,
        ]
        for check in checks
    ]


def size_cells(sizes: Sequence[Sized]) -> Cells:
    return [_sized(item) for item in sizes]


def _sized(item: Sized) -> list[str]:
    if item.run.failure or item.bound is None:
        return [item.model, item.run.failure, *[""] * (len(SIZE_COLUMNS) - 2)]
    return [
        item.model,
        f"{item.s_per_billion * item.parameters / 1e9:.2f}",
        f"{item.s_per_billion:.1f}",
        f"{item.planning_s:.1f}",
        _mb(item.run.peak_bytes),
        _mb(item.read_bytes),
        f"{item.bound.disk_s:.2f}",
    ]


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f}" if size_bytes else ""


def as_table(title: str, columns: Sequence[str], cells: Cells) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for line in cells:
        table.add_row(*line, style="yellow" if "NO" in line else "")
    return table


def as_markdown(record: Record, checks: Sequence[Check], commands: Sequence[str]) -> str:
    """The whole comparison, with what made it."""
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    lines = [
        "# Side by side with others",
        "",
        *(f"`{command}`  " for command in commands),
        f"on {os.cpu_count()} cores and {memory_gb:.0f} GB of memory: {record.workload}.",
        "",
        f"Seconds are medians over the steps listed (the first of each run left out; runs in turn). M = "
        f"{_mb(record.peak_of_eager)} MB, the peak of plain eager. Others: the largest share of the "
        "processors' time that other processes took during a run.",
        "",
        *_markdown_table(CHECK_COLUMNS, check_cells(checks)),
        *_markdown_table(ROW_COLUMNS, row_cells(record)),
        *(_markdown_table(SIZE_COLUMNS, size_cells(record.sizes)) if record.sizes else ()),
        *(f"- {name}: {what}" for name, what in record.what.items()),
        "",
    ]
    return "\n".join(lines)


def _markdown_table(columns: Sequence[str], cells: Cells) -> list[str]:
    header = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in cells]
    return [*header, *body, ""]
