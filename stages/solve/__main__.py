"""The solve stage alone: `python -m stages.solve model=gpt2 budget=8GB`, after stages.trace.profile."""

from __future__ import annotations

from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.process import Order, stage_main


def work(order: Order) -> None:
    from stages.solve.stage import run  # not while composing

    graph, costs = order.load(RegionGraph), order.load(Costs)
    plan, predicted = run(order.config, graph, costs, evaluation=order.load_evaluation())
    order.save(predicted)
    order.save(plan)


if __name__ == "__main__":
    stage_main("solve", work)
