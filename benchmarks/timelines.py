"""Predicted and measured time of a finished run, side by side for each class of work.

python -m benchmarks.timelines RUN_FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stages.artifacts.timeline import Event, Timeline
from stages.report.record import read_run

#: compute instructions that are told apart by the kind of their region
_OF_REGIONS = ("forward", "recompute", "backward", "evaluate")


@dataclass(frozen=True)
class Share:
    """What one class of instructions took: how many, their time in ms, and bytes moved."""

    count: int = 0
    ms: float = 0.0
    bytes: int = 0


def by_class(timeline: Timeline, kinds: Mapping[str, int]) -> dict[str, Share]:
    """Time per class: forward, backward and recompute by kind, updates, transfers by role, waiting.

    Args:
        kinds: Region name -> kind.
    """
    found: dict[str, Share] = {}
    for event in timeline.events:
        name = class_of(event, kinds)
        before = found.get(name, Share())
        took = (event.end_ns - event.start_ns) / 1e6
        found[name] = Share(before.count + 1, before.ms + took, before.bytes + event.bytes)
    end = max((event.end_ns for event in timeline.events), default=0) / 1e6
    computing = sum(event.end_ns - event.start_ns for event in timeline.events if event.lane == "compute")
    found["compute waits"] = Share(1, end - computing / 1e6)
    found["step"] = Share(1, end)
    return found


def class_of(event: Event, kinds: Mapping[str, int]) -> str:
    operation, _, rest = event.name.partition(" ")
    if operation in _OF_REGIONS:
        return f"{operation} kind {kinds.get(rest, '?')}"
    if event.lane == "compute":
        return operation
    role = rest.partition(" ")[0]
    moves_state = role not in ("weight", "master", "value", "value_gradient", "gradient", "saved")
    return f"{operation} {'state' if moves_state else role}"


def compare(folder: Path) -> dict[str, tuple[Share, Share]]:
    """Class -> (predicted, measured in the last step) of the run in `folder`.

    Raises:
        ArtifactError: A file is missing or damaged.
    """
    run = read_run(folder)
    kinds = {} if run.graph is None else {region.name: region.kind for region in run.graph.regions}
    of = {timeline.source: by_class(timeline, kinds) for timeline in run.timelines}
    predicted, measured = of.get("predicted", {}), of.get("measured", {})
    names = sorted(set(predicted) | set(measured), key=lambda name: (name == "step", name))
    return {name: (predicted.get(name, Share()), measured.get(name, Share())) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timelines", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    table = Table(title="One step: predicted and measured")
    for column in ("class", "count", "predicted ms", "measured ms", "difference ms", "MB moved"):
        table.add_column(column, justify="left" if column == "class" else "right")
    for name, (predicted, measured) in compare(parser.parse_args().folder).items():
        table.add_row(
            name, str(max(predicted.count, measured.count)), f"{predicted.ms:.1f}", f"{measured.ms:.1f}",
            f"{measured.ms - predicted.ms:+.1f}", f"{measured.bytes / 1e6:.1f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
