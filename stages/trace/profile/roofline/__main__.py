"""The roofline stage alone: `python -m stages.trace.profile.roofline model=llama3-8b hardware=rtx4090 budget=24GB`."""

from __future__ import annotations

from stages.artifacts.graph import RegionGraph
from stages.process import Order, stage_main


def work(order: Order) -> None:
    from stages.trace.profile.roofline.stage import run  # torch: not while composing

    order.save(run(order.config, order.load(RegionGraph)))


if __name__ == "__main__":
    stage_main("roofline", work)
