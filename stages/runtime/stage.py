"""The last stage: trains on the plan and reports what happened."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig
from stages.region import memory
from stages.runtime import export, reporting
from stages.runtime.data import open_batches
from stages.runtime.engine import Engine
from stages.runtime.loop import TrainingLoop

#: blocks of this size or more leave the process when freed, so that counting bytes predicts the peak
LARGE_BLOCK_BYTES = 1 << 20


def run(
    config: RunConfig, graph: g.RegionGraph, costs: Costs, plan: Plan, run_dir: Path
) -> tuple[Summary, list[Timeline]]:
    """Trains `config.steps` steps.

    Raises:
        StorageError: A tier is short or broken.
        DataError: The data does not fit the model.
        NumericsError: Too many steps in a row were skipped.
    """
    memory.give_back_large_blocks(LARGE_BLOCK_BYTES)
    torch.set_num_threads(costs.threads)
    with ExitStack() as stack:
        batches = open_batches(config, graph)
        engine = stack.enter_context(open_engine(config, graph, plan))
        started = time.monotonic()
        engine.load(_initial(config, graph))
        print(f"runtime: initial values in place after {time.monotonic() - started:.1f} s", flush=True)
        loop = TrainingLoop(engine, batches, config)
        loop.run()
        if config.export.final:
            export.export_weights(Path(config.export.final), engine.weights(), graph.export_config)
        return reporting.summarise(config, graph, costs, plan, loop), loop.timelines


def open_engine(config: RunConfig, graph: g.RegionGraph, plan: Plan) -> Engine:
    """The engine with its scratch file, lanes and kernel, as configured."""
