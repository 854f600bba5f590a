"""TensorBoard events of a run while it trains, by a small process of its own beside the training's.

    python -m stages.report.tensorboard RUN_FOLDER

It reads losses.csv and evaluations.csv as they grow and writes RUN_FOLDER/tensorboard until its input ends.
The library takes some 35 MB, which so are not the training's.
"""

from __future__ import annotations

import argparse
import csv
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts.losses import EVALUATIONS, LOSSES
from stages.stopping import PARENT, die_with_parent

_EVERY_S = 1.0
#: what it may take for the last events once training has ended
_END_S = 10.0
#: file -> column -> tag
_TAGS = {
    LOSSES: {"loss": "loss", "grad_norm": "grad_norm", "skipped": "skipped", "time_s": "step_time_s",
             "peak_bytes": "peak_bytes"},
    EVALUATIONS: {"loss": "evaluation/loss"},
}  # fmt: skip


@contextmanager
def following(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """While inside, events are written of what the run in `folder` reports."""
    line = [sys.executable, "-m", "stages.report.tensorboard", str(folder)]
    # a group of its own: a signal to the job must not end it before the training
    process = subprocess.Popen(
        line, env={**environment, PARENT: str(os.getpid())}, stdin=subprocess.PIPE, process_group=0
    )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print("[stages] tensorboard: the last events could not be written in time", file=sys.stderr)


@dataclass
class Follower:
    """What has been passed on: the last step of each file."""

    folder: Path
    last: dict[str, int] = field(default_factory=dict)

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps that came since the last call, with their numbers by tag."""
        for name, tags in _TAGS.items():
            for row in self._rows(name):
                step = int(row["step"])
                if step > self.last.get(name, 0):
                    self.last[name] = step
                    yield step, {tag: float(row[column]) for column, tag in tags.items() if row[column]}

    def _rows(self, name: str) -> list[dict[str, str]]:
        path = self.folder / name
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # the line that is being written comes the next time
        return list(csv.DictReader(whole.splitlines()))


def write_events(follower: Follower, writer: Any, event: Any, summary: Any) -> None:
    """Passes what is new on to `writer` (an EventFileWriter), as `event`s (its Event and Summary types)."""
    for step, numbers in follower.new():
        values = [summary.Value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        writer.add_event(event(wall_time=time.time(), step=step, summary=summary(value=values)))
    writer.flush()


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="Writes TensorBoard events of a run while it trains.")
    parser.add_argument("folder", type=Path, help="the run folder")
    folder: Path = parser.parse_args().folder
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore - optional
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore
    from tensorboard.summary.writer.event_file_writer import (  # pyright: ignore[reportMissingImports]
        EventFileWriter,
    )

    writer = EventFileWriter(str(folder / "tensorboard"))
    follower = Follower(folder)
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], _EVERY_S)[0])
        write_events(follower, writer, Event, Summary)
    writer.close()


if __name__ == "__main__":
    main()
