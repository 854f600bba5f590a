"""What a finished run left in its folder, read back: nothing is measured again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stages.artifacts import envelope
from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Event, Timeline


@dataclass(frozen=True)
class Run:
    """A run folder's content. `graph` gives regions their names; without it they have numbers."""

    summary: Summary
    plan: Plan
    timelines: list[Timeline]
    graph: RegionGraph | None = None

    @property
    def region_names(self) -> list[str]:
        if self.graph is not None:
            return [region.name for region in self.graph.regions]
        return [f"region {index}" for index in range(len(self.plan.placement.regions))]


def read_run(folder: Path) -> Run:
    """Reads summary.json, plan.json, timeline.json and, where there, graph.json.

    Raises:
        ArtifactError: A file is missing or damaged.
    """
    graph = folder / "graph.json"
    return Run(
        summary=_read_summary(folder / "summary.json"),
        plan=envelope.load(folder / "plan.json", Plan),
        timelines=_read_timelines(folder / "timeline.json"),
        graph=envelope.load(graph, RegionGraph) if graph.exists() else None,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}; expected what a finished run leaves") from error


def _read_summary(path: Path) -> Summary:
    content = _read_json(path)
    # JSON has no NaN: a loss that was not finite is null there
    content["losses"] = [math.nan if loss is None else loss for loss in content.get("losses", [])]
    try:
        return msgspec.convert(content, Summary)
    except msgspec.ValidationError as error:
        raise ArtifactError(f"{path} is not a summary: {error}") from error


def _read_timelines(path: Path) -> list[Timeline]:
    """The inverse of `to_chrome_trace`."""
    titles: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    events: dict[int, list[Event]] = {}
    memory: dict[int, list[tuple[int, int]]] = {}
    try:
        for entry in _read_json(path)["traceEvents"]:
            process = entry["pid"]
            if entry["ph"] == "M" and entry["name"] == "process_name":
                titles[process] = entry["args"]["name"]
            elif entry["ph"] == "M":
                lanes[process, entry["tid"]] = entry["args"]["name"]
            elif entry["ph"] == "C":
                memory.setdefault(process, []).append((round(entry["ts"] * 1000), entry["args"]["bytes"]))
            else:
                start = round(entry["ts"] * 1000)
                end = start + round(entry["dur"] * 1000)
                lane = lanes[process, entry["tid"]]
                event = Event(lane, entry["name"], start, end, entry["args"]["bytes"])
                events.setdefault(process, []).append(event)
    except (KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is not a timeline of a run: {error!r}") from error
    return [
        Timeline(title.split(" ")[0], _step_of(title), events.get(process, []), memory.get(process, []))
        for process, title in sorted(titles.items())
    ]


def _step_of(title: str) -> int:
    """The step in "measured (step 3)"."""
    digits = "".join(character for character in title if character.isdigit())
    return int(digits) if digits else 0
