"""The profile stage alone: `python -m stages.trace.profile model=gpt2 budget=8GB`, after stages.trace."""

from __future__ import annotations

import msgspec

from stages.artifacts.graph import RegionGraph
from stages.process import Order, peak_bytes, stage_main


def work(order: Order) -> None:
    from stages.trace.profile.stage import run  # torch: not while composing

    graph, provenance = order.load_with_provenance(RegionGraph)
    costs = run(order.config, graph)
    peaks = {"trace": provenance.peak_bytes, "profile": peak_bytes()}
    order.save(msgspec.structs.replace(costs, stage_peak_bytes=peaks))


if __name__ == "__main__":
    stage_main("profile", work)
