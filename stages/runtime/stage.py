"""The last stage: trains on the plan and reports what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig
from stages.optim.make import make_kernel
from stages.region import memory
from stages.region.initial import iterate_initial
from stages.runtime import reporting
from stages.runtime.data import open_batches
from stages.runtime.engine import Engine
from stages.runtime.export import export_weights
from stages.runtime.lanes.lane_set import LaneSet
from stages.runtime.loop import TrainingLoop
from stages.runtime.scratch import Scratch
from stages.runtime.tiers.disk import DiskFile

#: blocks of this size or more leave the process when freed, so that counting bytes predicts the peak
LARGE_BLOCK_BYTES = 1 << 20


def run(config: RunConfig, graph: g.RegionGraph, costs: Costs, plan: Plan) -> tuple[Summary, list[Timeline]]:
    """Trains `config.steps` steps.

    Raises:
        StorageError: A tier is short or broken.
        DataError: The data does not fit the model.
    """
    memory.give_back_large_blocks(LARGE_BLOCK_BYTES)
    torch.set_num_threads(costs.threads)
    batches = open_batches(config, graph)
    with open_engine(config, graph, plan) as engine:
        started = time.monotonic()
        engine.load(iterate_initial(graph, config.seed))
        print(f"initial values in place after {time.monotonic() - started:.1f} s", flush=True)
        if config.export.initial:
            # before the cast to bf16 or fp16, as the constructor made them
            _export(config.export.initial, graph, engine, masters=True)
        loop = TrainingLoop(engine, batches, config)
        loop.run()
        if config.export.final:
            _export(config.export.final, graph, engine, masters=False)
        return reporting.summarise(graph, costs, plan, loop), loop.timelines


def _export(folder: str, graph: g.RegionGraph, engine: Engine, *, masters: bool) -> None:
    export_weights(
        Path(folder), engine.weights(masters=masters), graph.export_config, parameters=graph.parameters
    )


@contextmanager
def open_engine(
    config: RunConfig, graph: g.RegionGraph, plan: Plan, evaluation: g.RegionGraph | None = None
) -> Iterator[Engine]:
    """The engine with its scratch file, lanes and kernel, as configured; closed and removed at the end.

    Raises:
        StorageError: The disk tier has no room for `plan.disk_bytes`.
    """
    kernel = make_kernel(config.optimizer.name, config.optimizer, graph.precision)
    with Scratch(Path(config.tiers.disk) if config.tiers.disk else None) as scratch:
        disk = DiskFile(scratch.path, plan.disk_bytes) if plan.disk_bytes else None
        lanes = LaneSet.of_kind(config.runtime.lane)
        poison = config.runtime.lane == "adversarial"
        engine = Engine(graph, plan, kernel, disk, lanes, evaluation, poison=poison)
        try:
            yield engine
        finally:
            engine.close()
