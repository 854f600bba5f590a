"""The runtime stage alone: `python -m stages.runtime model=gpt2 budget=8GB`, after stages.solve."""

from __future__ import annotations

import sys

import msgspec

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline, to_chrome_trace
from stages.process import REPLAN, Order, peak_bytes, stage_main
from stages.stopping import StopRequest


def work(order: Order) -> None:
    from stages.runtime.replan.watch import Handover, ReplanRequested  # torch: not while composing
    from stages.runtime.stage import Surroundings, run

    graph, costs = order.load(RegionGraph), order.load(Costs)
    plan, solve_provenance = order.load_with_provenance(Plan)
    evaluation = order.load_evaluation()
    request = StopRequest()
    surroundings = Surroundings(
        order.run_folder,
        predicted=order.inputs.get("predicted"),
        state=order.inputs.get("state"),
        handover=Handover(order.outputs["state"], order.outputs["costs"]) if order.outputs else None,
        request=request,
    )
    try:
        with request.installed():
            summary, measured = run(
                order.config, graph, costs, plan, evaluation and evaluation[0], surroundings
            )
    except ReplanRequested:
        sys.exit(REPLAN)
    timelines = [*measured]
    if "predicted" in order.inputs:
        timelines.insert(0, envelope.load(order.inputs["predicted"], Timeline))
    trace = msgspec.json.encode(to_chrome_trace(timelines))
    envelope.write(order.run_folder / "timeline.json", trace)
    # the loop resets the kernel's mark at each step, and keeps the largest
    own = summary.peak_bytes_by_stage.get("runtime", 0)
    peaks = {"runtime": own}
    # beside an accelerator processes are in host memory, which the budget is not of
    if plan.device == "cpu":
        own = max(own, peak_bytes())
        peaks = {**costs.stage_peak_bytes, "solve": solve_provenance.peak_bytes, "runtime": own}
    complete = msgspec.structs.replace(summary, peak_bytes_by_stage=peaks, peak_bytes=max(peaks.values()))
    write_summary(order, complete)


def write_summary(order: Order, summary: Summary) -> None:
    """summary.json is the record itself, without an envelope: people and scripts read it."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    envelope.write(order.run_folder / "summary.json", text)


if __name__ == "__main__":
    stage_main("runtime", work)
