"""Who did what when: predicted by the simulator, measured by the executor, in one form."""

from __future__ import annotations

from stages.artifacts.graph import Struct


class Event(Struct, frozen=True):
    """One instruction on one lane; nanoseconds from the step's start."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    bytes: int = 0


class Timeline(Struct, frozen=True):
    source: str  # "predicted" | "measured"
    step: int
    events: list[Event]
    memory: list[tuple[int, int]] = []  # (ns, bytes on the device)


def to_chrome_trace(timelines: list[Timeline]) -> dict[str, object]:
    """The Chrome trace (chrome://tracing, Perfetto): one process per timeline, one thread per lane.

    Times are microseconds there.
    """
    events: list[dict[str, object]] = []
    for process, timeline in enumerate(timelines):
        title = f"{timeline.source} (step {timeline.step})"
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}})
        lanes = sorted({event.lane for event in timeline.events})
        for thread, lane in enumerate(lanes):
            names = {"ph": "M", "pid": process, "tid": thread, "name": "thread_name"}
            events.append({**names, "args": {"name": lane}})
        for event in timeline.events:
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": lanes.index(event.lane),
                    "name": event.name,
                    "ts": event.start_ns / 1000,
                    "dur": (event.end_ns - event.start_ns) / 1000,
                    "args": {"bytes": event.bytes},
                }
            )
        for moment, held in timeline.memory:
            counter = {"ph": "C", "pid": process, "name": "device bytes", "ts": moment / 1000}
            events.append({**counter, "args": {"bytes": held}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
