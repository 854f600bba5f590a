"""What has been measured so far, kept in the work folder so that an interrupted comparison goes on."""

from __future__ import annotations

from pathlib import Path

import msgspec

from benchmarks.rivals.bounds import Bound
from benchmarks.rivals.running import Run
from benchmarks.rivals.sizes import Sized
from stages.artifacts.envelope import write_atomically


class Limit(msgspec.Struct, frozen=True):
    """The smallest memory cgroup that a contender survived; None: not even its limit without one."""

    contender: str
    bytes: int | None


class Record(msgspec.Struct):
    """workload, allocator: Names. what: Contender -> how it trains."""

    workload: str
    allocator: str = ""
    what: dict[str, str] = {}
    runs: list[Run] = []
    bounds: dict[str, Bound] = {}
    limits: list[Limit] = []
    sizes: list[Sized] = []

    @property
    def peak_of_eager(self) -> int:
        """M: of the first run of plain eager; 0: not run yet."""
        return next((run.peak_bytes for run in self.runs if run.contender == "eager"), 0)

    def limit_of(self, contender: str) -> Limit | None:
        return next((limit for limit in self.limits if limit.contender == contender), None)


def load(path: Path, workload: str) -> Record:
    """What was measured with that workload; nothing, where it was another."""
    if not path.exists():
        return Record(workload)
    found = msgspec.json.decode(path.read_bytes(), type=Record)
    return found if found.workload == workload else Record(workload)


def save(record: Record, path: Path) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(record), indent=1))
