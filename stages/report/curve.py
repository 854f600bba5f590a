"""The budget curve as table and picture: `python -m stages.report.curve RUN_FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stages.artifacts import envelope
from stages.artifacts.curve import Curve, CurvePoint
from stages.artifacts.errors import StageError
from stages.config import format_size
from stages.process import REFUSED, die_with_parent
from stages.report.pictures import curve_picture

_FILE_WIDTH = 160


def as_table(curve: Curve) -> Table:
    """One row per budget."""
    table = Table(title=f"{curve.model}, {curve.precision}: step time against budget", title_justify="left")
    for column in ("budget", "peak", "step", "tokens/s", "bound", "gap", "moved a step", "given up"):
        table.add_column(column, justify="left" if column == "given up" else "right")
    for point in curve.points:
        table.add_row(*_cells(curve, point))
    return table


def _cells(curve: Curve, point: CurvePoint) -> list[str]:
    step_s, bound_s = point.step_ns / 1e9, point.lower_bound_ns / 1e9
    return [
        format_size(point.budget_bytes),
        format_size(point.peak_bytes),
        f"{step_s:.3f} s",
        f"{curve.tokens / step_s:,.0f}" if step_s else "",
        f"{bound_s:.3f} s" if bound_s else "none",
        f"{step_s / bound_s - 1:.1%}" if bound_s else "",
        ", ".join(f"{link} {format_size(size)}" for link, size in point.moved_bytes.items() if size) or "-",
        _given_up(point),
    ]


def _given_up(point: CurvePoint) -> str:
    """What is not simply kept on the device, in counts of regions and parameters."""
    names = {"weights": "weights", "activations": "activations", "optimizer_state": "states"}
    parts = [
        f"{count} {names[what]} {choice}"
        for what, choices in point.placement.items()
        for choice, count in sorted(choices.items())
        if choice not in ("resident", "keep")
    ]
    if point.micro_batches > 1:
        parts.append(f"{point.micro_batches} micro-batches")
    return ", ".join(parts) or "nothing"


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="Draws curve.svg of curve.json and prints its table.")
    parser.add_argument("folder", type=Path, help="the run folder, with curve.json in it")
    folder: Path = parser.parse_args().folder
    try:
        curve = envelope.load(folder / "curve.json", Curve)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    envelope.write(folder / "curve.svg", curve_picture(curve).encode())
    console = Console()
    if not console.is_terminal:  # a file has no width, and rows should stay rows
        console = Console(width=_FILE_WIDTH)
    console.print(as_table(curve))
    console.print(f"{folder}/curve.json, curve.svg")


if __name__ == "__main__":
    main()
