"""Which numbers of micro-batches are measured, and whether any may be."""

from __future__ import annotations

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.artifacts.slicing import BATCH
from stages.config import RunConfig
from stages.trace.profile.separable import loss_of_slices


def loss_for(config: RunConfig, graph: g.RegionGraph, *, may_run: bool = True) -> tuple[str, str]:
    """How the losses of slices make the batch's, and why they do not where the solver could ask.

    Args:
        may_run: Whether regions may be run to find out.

    Raises:
        ConfigError: They do not, and the configuration asks for slices.
    """
    auto = config.solver.micro_batches == "auto"
    if config.train.micro_batches == 1 and not auto:
        return "", ""
    try:
        return loss_of_slices(graph, config.train.loss, may_run=may_run), ""
    except ConfigError as error:
        if not auto:
            raise
        print(f"profile: one micro-batch: {error}", flush=True)
        return "", str(error)


def numbers_of_slices(config: RunConfig, graph: g.RegionGraph, loss: str) -> list[int]:
    """What solver.micro_batches=auto may choose beside one: powers of two that divide the batch."""
    if config.solver.micro_batches != "auto" or not loss or BATCH not in graph.symbols:
        return []
    symbol, found, count = graph.symbols[BATCH], [], 2
    while symbol.planned % count == 0 and symbol.planned // count >= max(1, symbol.minimum):
        found.append(count)
        count *= 2
    return found
