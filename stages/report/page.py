"""report.html: one self-contained page about one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from stages.artifacts.timeline import Timeline
from stages.config import format_size
from stages.report.pictures import loss_picture, memory_picture, timeline_picture
from stages.report.record import Run

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222 }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: .9rem }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #ddd }
td.number { text-align: right; font-variant-numeric: tabular-nums }
svg { max-width: 100%; height: auto } details { margin-top: .5rem }
"""


def render(run: Run) -> str:
    """The page as text; it refers to nothing outside itself."""
    summary = run.summary
    title = escape(f"{summary.model} in {format_size(summary.budget_bytes)}")
    sections = [
        f"<h1>{title}</h1>",
        _overview(run),
        "<h2>Time: predicted and measured</h2>",
        timeline_picture(shown_timelines(run.timelines)),
        _table(("lane", "predicted busy", "measured busy"), _busy_rows(run.timelines)),
        "<h2>Memory against the budget</h2>",
        memory_picture(summary, shown_timelines(run.timelines)),
        _table(("stage", "peak"), _peak_rows(summary.peak_bytes_by_stage)),
        "<h2>Loss</h2>",
        loss_picture(summary.losses),
        "<h2>Placement</h2>",
        _table(("what", "choice", "count"), _placement_rows(summary.placement)),
        "<details><summary>Every region</summary>",
        _table(("region", "weights", "activations"), _region_rows(run)),
        "</details>",
    ]
    body = "\n".join(sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )


def shown_timelines(timelines: Sequence[Timeline]) -> list[Timeline]:
    """The prediction and the last measured step."""
    shown = [next((one for one in group if one.source == "predicted"), None) for group in (timelines,)]
    shown += [next((one for one in reversed(timelines) if one.source == "measured"), None)]
    return [timeline for timeline in shown if timeline is not None]


def _overview(run: Run) -> str:
    summary = run.summary
    rows = [
        ("solver", f"{summary.solver}, {summary.precision}, on {summary.device}, {summary.threads} threads"),
        ("optimizer", summary.optimizer_implementation),
        ("steps", f"{summary.steps}, of which skipped: {len(summary.skipped_steps)}"),
        ("step time", f"{summary.step_time_s:.3f} s (predicted {summary.predicted_step_time_s:.3f} s)"),
        *_origin_rows(run),
        ("tokens per second", f"{summary.tokens_per_s:.1f}"),
        ("budget", format_size(summary.budget_bytes)),
        (
            "peak",
            f"{format_size(summary.peak_bytes)} (predicted {format_size(summary.predicted_peak_bytes)})",
        ),
        ("least feasible budget", format_size(summary.least_feasible_bytes)),
        *((f"{link} per step", format_size(moved)) for link, moved in summary.moved_bytes_per_step.items()),
        ("versions", ", ".join(f"{name} {version}" for name, version in summary.versions.items())),
    ]
    return _table((), rows)


def _origin_rows(run: Run) -> list[tuple[str, str]]:
    """Where the run went over to another plan, or went on from a checkpoint."""
    summary = run.summary
    rows = []
    if summary.replanned_at is not None:
        first = summary.original_predicted_step_time_s
        said = "" if first is None else f"; the first plan predicted {first:.3f} s a step"
        rows.append(("plan", f"solved again after step {summary.replanned_at}{said}"))
    if summary.resumed_at is not None:
        rows.append(("resumed", f"after step {summary.resumed_at}"))
    return rows


def _busy_rows(timelines: Sequence[Timeline]) -> list[tuple[str, str, str]]:
    """Seconds in which each lane worked, in the prediction and in the last measured step; updates apart
    from the regions, whose time another optimizer would not change."""
    busy: dict[str, dict[str, int]] = {}
    for timeline in shown_timelines(timelines):
        for event in timeline.events:
            name = "compute, updates" if event.name.startswith("update ") else event.lane
            lane = busy.setdefault(name, {})
            lane[timeline.source] = lane.get(timeline.source, 0) + event.end_ns - event.start_ns

    def seconds(lane: str, source: str) -> str:
        return f"{busy[lane][source] / 1e9:.3f} s" if source in busy[lane] else "none"

    return [(lane, seconds(lane, "predicted"), seconds(lane, "measured")) for lane in sorted(busy)]


def _peak_rows(peaks: dict[str, int]) -> list[tuple[str, str]]:
    return [(stage, format_size(size)) for stage, size in peaks.items()]


def _placement_rows(placement: dict[str, dict[str, int]]) -> list[tuple[str, str, str]]:
    return [
        (what, choice, str(count)) for what, counts in placement.items() for choice, count in counts.items()
    ]


def _region_rows(run: Run) -> list[tuple[str, str, str]]:
    choices = run.plan.placement.regions
    return [
        (name, choice.weights, choice.activations)
        for name, choice in zip(run.region_names, choices, strict=True)
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = [f"<tr>{head}</tr>"] if heads else []
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        lines.append(f"<tr>{cells}</tr>")
    return "<table>" + "".join(lines) + "</table>"
