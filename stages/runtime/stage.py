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
from stages.runtime.export import export_initial, export_weights
from stages.runtime.lanes.lane_set import LaneSet
from stages.runtime.loop import TrainingLoop
from stages.runtime.scratch import ScratchFolder
from stages.runtime.tiers.disk import DiskFile


def run(
    config: RunConfig,
    graph: g.RegionGraph,
    costs: Costs,
    plan: Plan,
    evaluation: g.RegionGraph | None = None,
) -> tuple[Summary, list[Timeline]]:
    """Trains `config.steps` steps.

    Args:
        evaluation: The model in evaluation mode, where `config.eval.every` asks for it.

    Raises:
        StorageError: A tier is short or broken.
        DataError: The data does not fit the model.
    """
    memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES)
    torch.set_num_threads(costs.threads)
    batches = open_batches(config, graph)
    evaluated = None if evaluation is None else open_batches(config, evaluation, config.eval.path or None)
    with open_engine(config, graph, plan, evaluation) as engine:
        started = time.monotonic()
        engine.load(iterate_initial(graph, config.seed))
        print(f"initial values in place after {time.monotonic() - started:.1f} s", flush=True)
        if config.export.initial:
            export_initial(Path(config.export.initial), graph, config.seed)
        loop = TrainingLoop(engine, batches, config, evaluated)
        loop.run()
        if config.export.final:
            export_weights(Path(config.export.final), graph, engine.weights())
        return reporting.summarise(graph, costs, plan, loop), loop.timelines


@contextmanager
def open_engine(
    config: RunConfig, graph: g.RegionGraph, plan: Plan, evaluation: g.RegionGraph | None = None
) -> Iterator[Engine]:
    """The engine with its scratch file, lanes and kernel, as configured; closed and removed at the end.

    Raises:
        StorageError: The disk tier has no room for `plan.disk_bytes`.
    """
    kernel = make_kernel(config.optimizer.name, config.optimizer, graph.precision)
    with ScratchFolder(config.tiers.disk) as folder:
        disk = DiskFile(folder, plan.disk_bytes) if plan.disk_bytes else None
        lanes = LaneSet.of_kind(config.runtime.lane)
        poison = config.runtime.lane == "adversarial"
        engine = Engine(graph, plan, kernel, disk, lanes, evaluation, poison=poison)
        try:
            yield engine
        finally:
            engine.close()
