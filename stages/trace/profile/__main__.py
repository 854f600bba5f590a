"""The profile stage alone: `python -m stages.trace.profile model=gpt2 budget=8GB`, after stages.trace."""

from __future__ import annotations

import msgspec

from stages.artifacts.graph import RegionGraph
from stages.process import Order, peak_bytes, stage_main


def work(order: Order) -> None:
    from stages.trace.profile.stage import run  # torch: not while composing

    graph, provenance = order.load_with_provenance(RegionGraph)
    costs = run(order.config, graph)
    # measuring resets the kernel's mark, so the stage keeps the largest of before
    own = max(costs.stage_peak_bytes.get("profile", 0), peak_bytes())
    if costs.device == "cpu":  # beside an accelerator these stages are in host memory
        peaks = {**costs.stage_peak_bytes, "trace": provenance.peak_bytes, "profile": own}
        costs = msgspec.structs.replace(costs, stage_peak_bytes=peaks)
    order.save(costs, own)


if __name__ == "__main__":
    stage_main("profile", work)
