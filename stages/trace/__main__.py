"""The trace stage alone: `python -m stages.trace model=gpt2 budget=8GB`."""

from __future__ import annotations

from stages.process import Order, stage_main


def work(order: Order) -> None:
    from stages.optim.check import check_settings  # torch: not while composing
    from stages.trace.stage import run

    check_settings(order.config)
    order.save(run(order.config, order.config.trace.mode))


if __name__ == "__main__":
    stage_main("trace", work)
