"""Writes report.html and losses.csv into a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stages.artifacts.envelope import write
from stages.artifacts.losses import LOSSES, LOSSES_HEADER, losses_line
from stages.artifacts.summary import Summary
from stages.report.page import render
from stages.report.record import Run, read_run


def write_report(folder: Path) -> Run:
    """Reads the run in `folder` and writes its report beside it.

    Raises:
        ArtifactError: The run is not finished, or a file is damaged.
    """
    run = read_run(folder)
    write(folder / LOSSES, losses_csv(run.summary).encode())
    write(folder / "report.html", render(run).encode())
    return run


def losses_csv(summary: Summary) -> str:
    """One line per step. A loss is written so that reading it back gives the same float."""
    skipped = set(summary.skipped_steps)
    lines = [LOSSES_HEADER]
    for index, loss in enumerate(summary.losses):
        norm, time_s, peak_bytes = (
            _at(entries, index)
            for entries in (summary.grad_norms, summary.step_times_s, summary.step_peak_bytes)
        )
        peak = None if peak_bytes is None else int(peak_bytes)
        lines.append(
            losses_line(
                index + 1,
                loss,
                norm,
                time_s,
                peak,
                skipped=index + 1 in skipped,
                learning_rates=summary.learning_rates[index] if index < len(summary.learning_rates) else (),
                loss_scale=_at(summary.loss_scales, index),
            )
        )
    return "".join(lines)


def _at(entries: Sequence[float | None], index: int) -> float | None:
    return entries[index] if index < len(entries) else None
