"""The roofline stage: costs on other hardware, after stages.trace.

`python -m stages.trace.profile model=llama3-8b hardware=rtx4090 budget=24GB` runs both.
"""

from __future__ import annotations

from stages.artifacts.graph import RegionGraph
from stages.process import Order, stage_main


def work(order: Order) -> None:
    from stages.trace.profile.roofline.stage import run  # torch: not while composing

    order.save(run(order.config, order.load(RegionGraph)))


if __name__ == "__main__":
    stage_main("profile", work)
