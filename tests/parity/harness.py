"""Trains a small model through the whole pipeline, in one process, and compares with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor, nn

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs, LinkCost, OptimizerCost
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import Plan
from stages.artifacts.slicing import graph_of_slice
from stages.config import (
    DataConfig,
    DeviceConfig,
    LossScaleConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    RuntimeConfig,
    SolverConfig,
    TiersConfig,
    TrainConfig,
)
from stages.optim.groups import make_groups
from stages.region.initial import decode_literal, iterate_initial
from stages.runtime.stage import open_engine
from stages.solve import stage as solve
from stages.solve.solvers import SOLVERS
from stages.solve.task import Solution, Task
from stages.trace import stage as trace
from stages.trace.profile.cuts import loss_for
from stages.trace.profile.optimizer import state_specs
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.regions import measure_region
from stages.trace.profile.stand_ins import representative_cases
from tests import reference
from tests.models_for_tests import LENGTH, SmallModel, tokens
from tests.parity import reading_ahead

SEED = 3
LEARNING_RATE = 1e-2

#: of a made-up accelerator, its host and the host's disk
LINKS_BESIDE_HOST = [
    LinkCost("upload", 10_000, 2 * 10**9, 15 * 10**8),
    LinkCost("download", 10_000, 2 * 10**9, 15 * 10**8),
    LinkCost("disk_read", 50_000, 10**9, 5 * 10**8),
    LinkCost("disk_write", 50_000, 10**9, 5 * 10**8),
]

#: enough for any small model to stay whole in memory
AMPLE_BYTES = 1 << 30


@dataclass(frozen=True)
class Variant:
    """How a model is trained: by which solver, in how much memory, with which lanes.

    layout "tight" gives a slot to the next buffer as soon as it is free; the adversarial lane runs
    every transfer at the last moment and overwrites what is free or not yet fetched.
    share: of the way from the least budget to what everything in memory takes; solve: in the solver's place.
    """

    name: str
    solver: str
    least: bool
    layout: str = "packed"
    lane: str = "cpu"
    share: float = 0.0
    solve: Callable[[Task], Solution] | None = None
    device: str = "cpu"
    #: beside an accelerator; "": no limit
    host_budget: str = ""


RESIDENT = Variant("resident", "resident", least=False)
LEAST = Variant("least", "greedy_async", least=True)
REUSED_SLOTS = Variant("reused_slots", "layerwise", least=True, layout="tight")
ADVERSARIAL = Variant("adversarial", "greedy_async", least=True, layout="tight", lane="adversarial")
VARIANTS = [RESIDENT, LEAST, REUSED_SLOTS, ADVERSARIAL]
READ_AHEAD = Variant(
    "read_ahead", "milp", least=False, layout="tight", lane="adversarial", solve=reading_ahead.solve
)
AUTO = Variant("auto", "auto", least=True, lane="adversarial", share=0.3)


@cache
def traced(model: SmallModel, precision: str, rows: int) -> tuple[g.RegionGraph, Costs]:
    """Graph and costs. Models that are fed with tokens go the way of the command, with their initial
    values replayed; the others that of a live module."""
    config = config_of(model, precision, rows=rows)
    if model.make_batch is tokens:
        graph = trace.run(config)
    else:
        module, batch = _seeded(model), model.batches(1, rows=rows)[0]
        graph = trace.trace_module(module, (), batch, name=model.name, precision=precision, only_loss=True)
    return graph, costs_of(graph, config)


def _seeded(model: SmallModel) -> nn.Module:
    torch.manual_seed(SEED)
    return model.build()


def initial_values(model: SmallModel, graph: g.RegionGraph) -> Iterator[tuple[str, Tensor]]:
    if graph.initial.source != "live":
        yield from iterate_initial(graph, SEED)
        return
    module = _seeded(model)
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for parameter in graph.parameters:
        if parameter.literal is not None:
            yield parameter.name, decode_literal(parameter)
        else:
            yield parameter.name, held[parameter.name]


def config_of(
    model: SmallModel,
    precision: str,
    *,
    rows: int,
    solver: str = "resident",
    lane: str = "cpu",
    disk: Path = Path(),
    budget: int = AMPLE_BYTES,
) -> RunConfig:
    source = "transformers" if model.config else "module"
    return RunConfig(
        model=ModelConfig(model.name, source, model.target, model.config, dict(model.arguments)),
        data=DataConfig(name="random", batch_size=rows, seq_len=LENGTH),
        optimizer=OptimizerConfig(name="adamw", lr=LEARNING_RATE),
        solver=SolverConfig(name=solver),
        device=DeviceConfig(name="cpu"),
        tiers=TiersConfig(disk=str(disk)),
        runtime=RuntimeConfig(lane=lane),
        budget=str(budget),
        precision=precision,
        seed=SEED,
    )


def costs_of(graph: g.RegionGraph, config: RunConfig) -> Costs:
    """Measured memory of the regions; links and optimizer as of a made-up machine, so that the plan
    does not depend on what else this one does."""
    kernel = make_groups(config.optimizer, graph.parameters, graph.precision)
    loss, _ = loss_for(config, graph)
    graph = graph_of_slice(graph, config.train.micro_batches)
    cases = representative_cases(graph)
    return Costs(
        device="cpu",
        threads=torch.get_num_threads(),
        source="measured",
        baseline_bytes=0,
        stage_peak_bytes={},
        micro_batches=config.train.micro_batches,
        loss=loss,
        regions=[measure_region(graph, case, PeakGauge()) for case in cases.values()],
        links=[LinkCost(name, 50_000, 10**9, 5 * 10**8) for name in ("disk_read", "disk_write")],
        optimizer=OptimizerCost(
            implementation=kernel.base.implementation,
            chunkable=kernel.base.chunkable,
            elements_per_s=10**8,
            latency_ns=10_000,
            states=state_specs(graph, kernel),
            workspace_bytes_per_element=0 if graph.precision == "fp32" else 4,
        ),
    )


@cache
def sliced_costs(model: SmallModel, precision: str, rows: int, micro_batches: int, loss: str) -> Costs:
    """Costs of slices of the batch."""
    graph, _ = traced(model, precision, rows)
    config = replace(config_of(model, precision, rows=rows), train=TrainConfig(micro_batches, loss))
    return costs_of(graph, config)


def plan_of(config: RunConfig, graph: g.RegionGraph, costs: Costs, variant: Variant, order: str = "") -> Plan:
    """The plan at an ample budget or at exactly the least one that the solver names."""
    config.solver = replace(config.solver, micro_batch_order=order or "auto", time_limit_s=1.0)
    if variant.least:
        with pytest.raises(InfeasibleBudgetError) as refusal:
            solve.run(config, graph, costs, layout=variant.layout)
        least = refusal.value.least_feasible_bytes or 0
        config.budget = str(least + round(variant.share * (_resident_bytes(config, graph, costs) - least)))
    solver = SOLVERS[variant.solver] if variant.solve is None else variant.solve
    with mock.patch.dict(SOLVERS, {variant.solver: solver}):
        plan = solve.run(config, graph, costs, layout=variant.layout)[0]
    assert plan.placement.micro_batch_order == order or not order
    return plan


def _resident_bytes(config: RunConfig, graph: g.RegionGraph, costs: Costs) -> int:
    """The budget in which everything stays."""
    ample = replace(config, budget=str(AMPLE_BYTES), solver=replace(config.solver, name="resident"))
    plan = solve.run(ample, graph, costs)[0]
    return plan.prediction.peak_bytes + plan.margin_bytes


def train(
    model: SmallModel,
    precision: str,
    batches: list[dict[str, Tensor]],
    variant: Variant,
    *,
    steps: int,
    disk: Path,
    micro_batches: int = 1,
    order: str = "",
    loss: str = "mean",
    rules: TrainConfig | None = None,
    loss_scale: LossScaleConfig | None = None,
) -> reference.Result:
    """As `tests.reference.train`, through trace, costs, plan and engine.

    Args:
        order: Of the micro-batches; "": as the solver chooses.
        rules: Clipping, skipping and accumulation; its micro-batches are those of `micro_batches`.
    """
    budget = 1 if variant.least else AMPLE_BYTES
    rows = max(len(next(iter(batch.values()))) for batch in batches)
    config = config_of(
        model, precision, solver=variant.solver, lane=variant.lane, rows=rows, disk=disk, budget=budget
    )
    graph, costs = traced(model, precision, rows)
    config.train = replace(rules or TrainConfig(), micro_batches=micro_batches)
    config.loss_scale = loss_scale or LossScaleConfig()
    if micro_batches > 1:
        config.train.loss = loss
        costs = sliced_costs(model, precision, rows, micro_batches, loss)
    if variant.device != "cpu":
        costs = msgspec.structs.replace(costs, device=variant.device, links=LINKS_BESIDE_HOST)
        config.tiers = replace(config.tiers, host_budget=variant.host_budget)
    plan = plan_of(config, graph, costs, variant, order)
    result = reference.Result(losses=[], final={}, masters={}, rng_states=[])
    with open_engine(config, graph, plan) as engine:
        engine.load(initial_values(model, graph))
        torch.manual_seed(SEED)
        for step in range(1, steps + 1):
            calls = range((step - 1) * config.train.accumulate, step * config.train.accumulate)
            used = [inputs_of(graph, batches[call % len(batches)]) for call in calls]
            done = engine.step_over(used)
            result.losses.append(done.loss)
            result.norms.append(done.grad_norm)
            result.rng_states.append(torch.get_rng_state())
            result.scales.append(engine.guard.scale)
            if done.skipped:
                result.skipped_steps.append(step)
        for parameter, tensor in engine.weights():
            result.final |= {name: tensor.clone() for name in parameter.names}
    return result


def inputs_of(graph: g.RegionGraph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch under the graph's input names; `path` is ["kwargs", NAME]."""
    return {spec.name: batch[str(spec.path[-1])] for spec in graph.inputs}
