"""The run in a few lines for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from stages.artifacts.summary import Summary
from stages.config import format_size


def print_summary(summary: Summary, folder: str, console: Console | None = None) -> None:
    table = Table(title=f"{summary.model}: {summary.steps} steps", show_header=False, title_justify="left")
    first, last = summary.losses[0], summary.losses[-5:]
    peak = f"{format_size(summary.peak_bytes)} of {format_size(summary.budget_bytes)}"
    rows = {
        "loss": f"{first:.4f} at first, {sum(last) / len(last):.4f} mean of the last {len(last)}",
        "peak memory": f"{peak} (predicted {format_size(summary.predicted_peak_bytes)})",
        "least feasible budget": format_size(summary.least_feasible_bytes),
        "step time": f"{summary.step_time_s:.3f} s (predicted {summary.predicted_step_time_s:.3f} s)",
        "tokens per second": f"{summary.tokens_per_s:.1f}",
        "moved per step": ", ".join(
            f"{link} {format_size(size)}" for link, size in summary.moved_bytes_per_step.items()
        ),
        "solver": f"{summary.solver}, {summary.precision}, {summary.optimizer_implementation}",
        "report": f"{folder}/report.html",
    }
    if (step := summary.replanned_at) is not None:
        rows["plan"] = f"solved again after step {step}, with the costs of the first steps"
    for name, value in rows.items():
        table.add_row(name, value)
    (console or Console()).print(table)
