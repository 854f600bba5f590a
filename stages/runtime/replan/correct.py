"""Costs as a run's first steps show them: each class of instructions by how far off it was.

A class is scaled as a whole by measured over predicted time, so that whatever else the simulator
models of it (latencies, contention) stays in proportion.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from stages.artifacts.costs import Costs, LinkCost, OptimizerCost, RegionCost

#: ("forward" | "backward", region kind), ("update" | "read" | "write", -1)
Class = tuple[str, int]

_LINKS = {"disk_read": ("read", -1), "disk_write": ("write", -1)}


def corrected(costs: Costs, ratios: Mapping[Class, float], baseline_excess_bytes: int) -> Costs:
    """`costs` with the measured times, and what the process holds beyond the predicted peak.

    Args:
        ratios: Measured over predicted time of each class that ran; others stay as they are.
        baseline_excess_bytes: Measured minus predicted peak, where that is positive.
    """
    return msgspec.structs.replace(
        costs,
        baseline_bytes=costs.baseline_bytes + max(0, baseline_excess_bytes),
        regions=[_region(cost, ratios) for cost in costs.regions],
        links=[_link(link, ratios) for link in costs.links],
        slices=[
            msgspec.structs.replace(item, regions=[_region(cost, ratios) for cost in item.regions])
            for item in costs.slices
        ],
        optimizer=_optimizer(costs.optimizer, ratios.get(("update", -1), 1.0)),
    )


def _region(cost: RegionCost, ratios: Mapping[Class, float]) -> RegionCost:
    return msgspec.structs.replace(
        cost,
        forward_ns=round(cost.forward_ns * ratios.get(("forward", cost.kind), 1.0)),
        backward_ns=round(cost.backward_ns * ratios.get(("backward", cost.kind), 1.0)),
    )


def _link(link: LinkCost, ratios: Mapping[Class, float]) -> LinkCost:
    ratio = ratios.get(_LINKS.get(link.name, ("", -1)), 1.0)

    def slower(bytes_per_s: int) -> int:
        return max(1, round(bytes_per_s / ratio)) if bytes_per_s else 0

    return msgspec.structs.replace(
        link,
        latency_ns=round(link.latency_ns * ratio),
        bytes_per_s=slower(link.bytes_per_s),
        contended_bytes_per_s=slower(link.contended_bytes_per_s),
        busy_bytes_per_s=slower(link.busy_bytes_per_s),
        busy_contended_bytes_per_s=slower(link.busy_contended_bytes_per_s),
        scattered_block_ns=round(link.scattered_block_ns * ratio),
    )


def _optimizer(optimizer: OptimizerCost, ratio: float) -> OptimizerCost:
    return msgspec.structs.replace(
        optimizer,
        latency_ns=round(optimizer.latency_ns * ratio),
        elements_per_s=max(1, round(optimizer.elements_per_s / ratio)),
    )
