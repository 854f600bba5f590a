"""Writes report.html and losses.csv into a run folder."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from stages.artifacts.envelope import write_atomically
from stages.artifacts.summary import Summary
from stages.report.page import render
from stages.report.record import Run, read_run


def write_report(folder: Path) -> Run:
    """Reads the run in `folder` and writes its report beside it.

    Raises:
        ArtifactError: The run is not finished, or a file is damaged.
    """
    run = read_run(folder)
    write_atomically(folder / "losses.csv", losses_csv(run.summary).encode())
    write_atomically(folder / "report.html", render(run).encode())
    return run


def losses_csv(summary: Summary) -> str:
    """One line per step. A loss is written so that reading it back gives the same float."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "loss", "grad_norm", "skipped"])
    skipped = set(summary.skipped_steps)
    for step, loss in enumerate(summary.losses, start=1):
        norm = summary.grad_norms[step - 1] if step <= len(summary.grad_norms) else None
        writer.writerow([step, repr(loss), "" if norm is None else repr(norm), int(step in skipped)])
    return text.getvalue()
