"""Pictures of a run as SVG, drawn by matplotlib from artifacts."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.artifacts.curve import Curve
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline

#: above this, bars become a bitmap inside the SVG: an element for each would be megabytes
_MOST_VECTOR_BARS = 3000
_COLORS = {"compute": "#3b6fb6", "read": "#3a9a5b", "write": "#c9762b"}
_OTHER_COLOR = "#7a7a7a"
_MEGABYTE = 10**6


@contextmanager
def _style(name: str) -> Iterator[None]:
    # the salt makes ids differ between pictures of one page, and not between two runs
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        yield


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def timeline_picture(timelines: list[Timeline]) -> str:
    """The lanes of each timeline as bars over one axis of seconds, predicted above measured."""
    rows = [(timeline, lane) for timeline in timelines for lane in _lanes(timeline)]
    with _style("timeline"):
        figure = Figure(figsize=(10, 0.8 + 0.4 * len(rows)))
        axes = figure.add_subplot()
        for row, (timeline, lane) in enumerate(rows):
            _draw_lane(axes, row, timeline, lane)
        axes.set_yticks(range(len(rows)), [f"{timeline.source} {lane}" for timeline, lane in rows])
        axes.invert_yaxis()
        axes.set_xlabel("seconds from the start of the step")
        axes.set_xlim(left=0)
        return _svg(figure)


def _lanes(timeline: Timeline) -> list[str]:
    known = [lane for lane in _COLORS if any(event.lane == lane for event in timeline.events)]
    return known + sorted({event.lane for event in timeline.events} - set(known))


def _draw_lane(axes: Axes, row: int, timeline: Timeline, lane: str) -> None:
    bars = [
        (event.start_ns / 1e9, (event.end_ns - event.start_ns) / 1e9)
        for event in timeline.events
        if event.lane == lane
    ]
    color = _COLORS.get(lane, _OTHER_COLOR)
    many = len(bars) > _MOST_VECTOR_BARS
    axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=color, edgecolors="white", lw=0.2, rasterized=many)


def memory_picture(summary: Summary, timelines: list[Timeline]) -> str:
    """Predicted memory within a step, the measured peak of each step, and the budget, in MB."""
    with _style("memory"):
        figure = Figure(figsize=(10, 2.8))
        within, steps = figure.subplots(1, 2, sharey=True)
        for timeline in timelines:
            if timeline.memory:
                times = [moment / 1e9 for moment, _ in timeline.memory]
                held = [size / _MEGABYTE for _, size in timeline.memory]
                within.step(times, held, where="post", label=timeline.source)
        within.set_xlabel("seconds from the start of the step")
        within.set_ylabel("MB")
        peaks = [size / _MEGABYTE for size in summary.step_peak_bytes]
        steps.plot(range(1, len(peaks) + 1), peaks, marker="o", ms=3, label="measured peak")
        steps.axhline(
            summary.predicted_peak_bytes / _MEGABYTE, ls=":", color="#3b6fb6", label="predicted peak"
        )
        steps.set_xlabel("step")
        for axes in (within, steps):
            axes.axhline(summary.budget_bytes / _MEGABYTE, color="#b03030", label="budget")
            axes.set_ylim(bottom=0)
            axes.legend(loc="lower right", fontsize=8)
        return _svg(figure)


def loss_picture(losses: list[float]) -> str:
    """Loss over steps; steps whose loss is not finite are gaps."""
    with _style("loss"):
        figure = Figure(figsize=(10, 2.4))
        axes = figure.add_subplot()
        finite = [loss if math.isfinite(loss) else math.nan for loss in losses]
        axes.plot(range(1, len(finite) + 1), finite, marker="o", ms=3, color="#3b6fb6")
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        return _svg(figure)


def curve_picture(curve: Curve) -> str:
    """Step time and its lower bound in seconds over the budget in MB, which is logarithmic."""
    budgets = [point.budget_bytes / _MEGABYTE for point in curve.points]
    bounds = [(budget, point) for budget, point in zip(budgets, curve.points, strict=True)]
    with _style("curve"):
        figure = Figure(figsize=(7, 4))
        axes = figure.add_subplot()
        axes.plot(budgets, [point.step_ns / 1e9 for point in curve.points], marker="o", label="planned step")
        proven = [(budget, point.lower_bound_ns / 1e9) for budget, point in bounds if point.lower_bound_ns]
        if proven:
            axes.plot(*zip(*proven, strict=True), linestyle="--", label="lower bound")
        axes.set_xscale("log")
        axes.set_xlabel("budget, MB")
        axes.set_ylabel("seconds per step")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{curve.model}, {curve.precision}, {curve.device}")
        axes.legend()
        return _svg(figure)
