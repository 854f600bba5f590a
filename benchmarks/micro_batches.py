"""One batch whole and in micro-batches, under tight budgets: step time and bytes moved.

    python -m benchmarks.micro_batches
    python -m benchmarks.micro_batches --layers 2 --width 128 --steps 3

A GPT-2 with a large vocabulary: its logits are what a batch that is cut need not hold at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import Plan
from stages.artifacts.slicing import ORDERS, VERTICAL, costs_of_slice
from stages.config import (
    DataConfig,
    DeviceConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SolverConfig,
    TiersConfig,
    TrainConfig,
    format_size,
)
from stages.region.initial import iterate_initial
from stages.runtime.data import open_batches
from stages.runtime.stage import open_engine
from stages.solve import stage as solve
from stages.trace import stage as trace
from stages.trace.profile import stage as profile


def configuration(options: argparse.Namespace, disk: str) -> RunConfig:
    arguments = {
        "n_layer": options.layers,
        "n_embd": options.width,
        "n_head": options.width // 64 or 1,
        "vocab_size": options.vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = ModelConfig(
        "gpt2-small", "transformers", "transformers.GPT2LMHeadModel", "transformers.GPT2Config", arguments
    )
    return RunConfig(
        model=model,
        data=DataConfig(name="random", batch_size=options.batch_size, seq_len=options.seq_len),
        optimizer=OptimizerConfig(name="adamw"),
        solver=SolverConfig(options.solver, micro_batches="auto"),
        device=DeviceConfig(name="cpu"),
        tiers=TiersConfig(disk=disk),
        budget="1TB",
    )


def plan_of(config: RunConfig, graph: g.RegionGraph, costs: Costs, count: int, order: str) -> Plan | None:
    """The plan with the batch cut in this way; None where the budget does not hold it."""
    solver = dataclasses.replace(config.solver, micro_batches="given", micro_batch_order=order)
    given = dataclasses.replace(config, train=TrainConfig(count), solver=solver)
    try:
        return solve.run(given, graph, costs_of_slice(costs, count))[0]
    except InfeasibleBudgetError:
        return None


def least_bytes(config: RunConfig, graph: g.RegionGraph, costs: Costs) -> int:
    """The least budget of the whole batch."""
    try:
        solver = dataclasses.replace(config.solver, micro_batches="given")
        solve.run(dataclasses.replace(config, solver=solver, budget="1"), graph, costs)
    except InfeasibleBudgetError as refusal:
        return refusal.least_feasible_bytes or 0
    raise AssertionError("one byte was enough")


def measure(config: RunConfig, graph: g.RegionGraph, plan: Plan, steps: int) -> float:
    """Median seconds of a step, the first left out."""
    batches = open_batches(config, graph)
    times = []
    with open_engine(config, graph, plan) as engine:
        engine.load(iterate_initial(graph, config.seed))
        torch.manual_seed(config.seed)
        for _ in range(steps + 1):
            started = time.perf_counter()
            engine.step(batches.next(), config.optimizer.lr)
            times.append(time.perf_counter() - started)
    return median(times[1:])


def compare(config: RunConfig, options: argparse.Namespace, console: Console) -> None:
    graph = trace.run(config)
    costs = profile.run(config, graph)
    console.print(f"the loss of slices makes the batch's as {costs.loss or costs.inseparable}")
    least = least_bytes(config, graph, costs)
    counts = [1, *(item.micro_batches for item in costs.slices)]
    for factor in options.budgets:
        budget = round(least * factor)
        table = Table(title=f"budget {format_size(budget)}: {factor} of the least for the whole batch")
        for name in ("slices", "order", "step, predicted", "step, measured", "read per step", "written"):
            table.add_column(name, justify="right")
        for count in counts:
            for order in ORDERS if count > 1 else (VERTICAL,):
                own = dataclasses.replace(config, budget=str(budget))
                plan = plan_of(own, graph, costs, count, order)
                table.add_row(str(count), order, *_cells(own, graph, plan, options.steps))
        console.print(table)


def _cells(config: RunConfig, graph: g.RegionGraph, plan: Plan | None, steps: int) -> list[str]:
    if plan is None:
        return ["does not fit", "", "", ""]
    moved = plan.prediction.moved_bytes
    return [
        f"{plan.prediction.step_ns / 1e9:.2f} s",
        f"{measure(config, graph, plan, steps):.2f} s" if steps else "",
        f"{moved['read'] / 1e6:.0f} MB",
        f"{moved['write'] / 1e6:.0f} MB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each plan; 0: none")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.02, 1.2])
    parser.add_argument("--solver", default="greedy_async")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as disk:
        compare(configuration(options, disk), options, Console())


if __name__ == "__main__":
    main()
