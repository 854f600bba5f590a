"""The least time in which a run's work could be done by the resources that it uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stages.artifacts import envelope
from stages.artifacts.costs import Costs, LinkCost
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.artifacts.slicing import costs_of_slice
from stages.artifacts.summary import Summary
from stages.solve.build import build_problem
from stages.solve.clock import compute_ns

_NS_PER_S = 1e9
_UNKNOWN = LinkCost("", 0, 0, 0)


@dataclass(frozen=True)
class Bound:
    """Seconds of one step by resource.

    compute_s: All compute instructions of the plan, recomputation included, as profiled alone. read_s,
    write_s: Bytes moved over the link's bandwidth alone. disk_s: Both over one disk (`time_of_both`).
    """

    compute_s: float
    read_s: float
    write_s: float
    disk_s: float

    @property
    def step_s(self) -> float:
        """The largest of compute and each link by itself."""
        return max(self.compute_s, self.read_s, self.write_s)

    @property
    def together_s(self) -> float:
        """The larger of compute and the disk, whose directions slow one another."""
        return max(self.compute_s, self.disk_s)


def bound_of(folder: Path) -> Bound:
    """The bound of a finished run, from its costs, its plan and the bytes that it moved.

    Raises:
        ArtifactError: A file is missing or damaged.
    """
    plan = envelope.load(folder / "plan.json", Plan)
    costs = envelope.load(folder / "costs.json", Costs)
    graph = envelope.load(folder / "graph.json", RegionGraph)
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    moved = summary.moved_bytes_per_step
    links = {link.name: link for link in costs.links}
    read, write = links.get("disk_read", _UNKNOWN), links.get("disk_write", _UNKNOWN)
    read_bytes, written_bytes = moved.get("disk_read", 0), moved.get("disk_write", 0)
    return Bound(
        compute_s=compute_s(plan, graph, costs),
        read_s=read_bytes / max(1, read.bytes_per_s),
        write_s=written_bytes / max(1, write.bytes_per_s),
        disk_s=time_of_both(read_bytes, written_bytes, read, write),
    )


def compute_s(plan: Plan, graph: RegionGraph, costs: Costs) -> float:
    """What the plan computes in one step, with nothing to wait for."""
    count, order = plan.placement.micro_batches, plan.placement.micro_batch_order
    problem = build_problem(graph, costs_of_slice(costs, count), micro_batches=count, order=order)
    steps = [phase for phase in plan.phases if phase.name in ("step", "update")]
    computed = (item for phase in steps for item in phase.instructions if item.lane == "compute")
    return sum(compute_ns(problem, item) for item in computed) / _NS_PER_S


def time_of_both(read_bytes: int, written_bytes: int, read: LinkCost, write: LinkCost) -> float:
    """Least seconds for one disk to move both, at the bandwidths measured alone and together.

    While both directions have work they go at the contended bandwidths, or one after the other where that is
    faster; the rest goes alone.
    """
    alone = read_bytes / max(1, read.bytes_per_s), written_bytes / max(1, write.bytes_per_s)
    if not all(alone):
        return max(alone)
    reading = read_bytes / max(1, read.contended_bytes_per_s or read.bytes_per_s)
    writing = written_bytes / max(1, write.contended_bytes_per_s or write.bytes_per_s)
    both = min(reading, writing)
    rest = alone[0] * (1 - both / reading) + alone[1] * (1 - both / writing)
    return min(sum(alone), both + rest)
