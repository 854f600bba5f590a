"""Training in anybody's own loop: `stages.offload(model, batch, budget)`.

with stages.offload(model, {"input_ids": ids, "labels": ids}, "2GB", lr=1e-4) as session:
    for batch in batches:
        loss = session.step(batch)
    model.load_state_dict(session.state_dict())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import nn

from stages.api_optimizer import optimizer_settings, settings_of_instance
from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.errors import ConfigError, StageError
from stages.artifacts.plan import Plan
from stages.batch_structure import Batch, BatchStructure, arguments
from stages.config import (
    DataConfig,
    DeviceConfig,
    LossScaleConfig,
    ModelConfig,
    RunConfig,
    RuntimeConfig,
    SolverConfig,
    TiersConfig,
    TrainConfig,
)
from stages.region import memory
from stages.region.initial import decode_literal
from stages.runtime.engine import Engine, StepResult
from stages.runtime.export import export_weights
from stages.runtime.stage import open_engine
from stages.solve import stage as solve
from stages.trace import stage as trace
from stages.trace.profile import stage as profile
from stages.trace.structure import replaced


@dataclass(frozen=True)
class Prepared:
    """A traced and profiled model, ready to be planned for any budget."""

    config: RunConfig
    graph: g.RegionGraph
    costs: Costs
    evaluation: tuple[g.RegionGraph, Costs] | None
    #: what batches must look like, in training and in evaluation
    structure: BatchStructure
    #: what forward returns, tensors empty; None: outputs were not asked for
    output: Any = None

    def plan(self, budget: str | int) -> Plan:
        """The verified plan inside `budget`.

        Raises:
            InfeasibleBudgetError: No plan fits; carries the least budget.
            ConfigError: `budget` is no size.
        """
        config = replace(self.config, budget=str(budget))
        return solve.run(config, self.graph, self.costs, evaluation=self.evaluation)[0]


class Session:
    """A model in training on a plan. A context manager; `close` gives all memory and disk back.

    The model's own tensors are copied into the plan's tiers and not touched afterwards: drop the
    model to free them.
    """

    def __init__(self, model: nn.Module, prepared: Prepared, plan: Plan) -> None:
        self.plan = plan
        self._graph = prepared.graph
        self._structure = prepared.structure
        self._output = prepared.output
        self._evaluates = prepared.evaluation is not None
        evaluation = None if prepared.evaluation is None else prepared.evaluation[0]
        # the plan counts on it; not undone at the end, since the allocator cannot tell what was set before
        memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES, prepared.costs.threads)
        with ExitStack() as stack:
            engine = stack.enter_context(open_engine(prepared.config, prepared.graph, plan, evaluation))
            engine.load(_live_values(model, prepared.graph))
            self._engine: Engine | None = engine
            self._resources = stack.pop_all()

    def step(self, batch: Batch, *, lr: float | None = None) -> float:
        """Forward, backward and update on one batch; the loss.

        Args:
            batch: In the structure of the one that was planned; a mapping is keyword arguments, a
                sequence positional ones. Sizes at most those planned.
            lr: Learning rate of this step; None: that of the session.

        Raises:
            DataError: The batch does not fit the plan; nothing has changed then.
        """
        return self.step_in_full(batch, lr=lr).loss

    def step_in_full(self, batch: Batch, *, lr: float | None = None) -> StepResult:
        """As `step`, with gradient norm, skip and timeline."""
        engine = self._open_engine()
        return self._noted(engine.step(self._structure.tensors(batch, self._graph.inputs), lr))

    def _noted(self, result: StepResult) -> StepResult:
        """Tells schedulers of the update."""
        if not result.skipped:
            self.optimizer.step()
        return result

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """For torch's schedulers, and to change settings: `param_groups` as configured, those of what no
        pattern matches last. It holds no tensors; the session makes the updates.
        """
        return self._open_engine().optimizer

    def step_over(self, batches: Sequence[Batch], *, lr: float | None = None) -> StepResult:
        """One update from several batches, whose losses count equally, as from so many calls of
        `(loss / len(batches)).backward()`. For sessions made with `accumulate` above 1.

        Raises:
            DataError: The first batch does not fit the plan; nothing has changed then.
        """
        named = [self._structure.tensors(batch, self._graph.inputs) for batch in batches]
        return self._noted(self._open_engine().step_over(named, lr))

    def backward(self, batch: Batch, weight: float = 1.0) -> float:
        """Forward and backward of `loss * weight`; gradients add up until `apply`. The loss itself.

        Raises:
            ConfigError: The session was not made with `accumulate` above 1 (any number of calls may come).
            DataError: The batch does not fit the plan.
        """
        return self._open_engine().backward(self._structure.tensors(batch, self._graph.inputs), weight)

    def apply(self, *, lr: float | None = None) -> StepResult:
        """The update from what `backward` has added up; `loss` is the weighted sum.

        Raises:
            StageError: There was no backward since the last update.
        """
        return self._noted(self._open_engine().apply(lr))

    def evaluate(self, batch: Batch) -> float:
        """The loss in evaluation mode, without gradients.

        Raises:
            ConfigError: The session was made without `evaluate=True`.
        """
        if not self._evaluates:
            raise ConfigError(
                "this session was not made for evaluation; make it with evaluate=True", key="evaluate"
            )
        return self._open_engine().evaluate(self._structure.tensors(batch, self._graph.inputs))

    def forward(self, batch: Batch) -> Any:
        """What the model returns in evaluation mode, as it returns it, without gradients.

        Objects of types of their own in it (caches for generation) are None. The tensors are the caller's:
        the plan counts them until this call returns.

        Raises:
            ConfigError: The session was made without `outputs=True`.
        """
        if self._output is None:
            raise ConfigError(
                "this session was not made for outputs; make it with outputs=True", key="outputs"
            )
        tensors = self._structure.tensors(batch, self._graph.inputs)
        return replaced(self._output, iter(self._open_engine().forward(tensors)))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Weights and buffers now, as the model's own state dict has them.

        Tied names share one tensor; buffers that are not persistent are left out.
        """
        return {
            name: tensor
            for parameter, held in self._open_engine().weights()
            if parameter.persistent
            for tensor in [held.clone()]
            for name in parameter.names
        }

    def save(self, folder: str | Path) -> list[Path]:
        """Writes the state dict as safetensors (and config.json for Hugging Face models), one tensor
        in memory at a time; returns the files.

        `safetensors.torch.load_model(model, FILE)` and `from_pretrained(folder)` read them.

        Raises:
            StorageError: The folder cannot be written or is full.
        """
        return export_weights(Path(folder), self._graph, self._open_engine().weights())

    def close(self) -> None:
        """Ends the session and gives its memory and disk back. Safe to call twice."""
        self._resources.close()
        # what held the session's tensors is garbage only once nothing refers to the engine
        self._engine = None
        memory.trim()

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise StageError(
                "the session is closed and its training state is gone; expected an open one. "
                "Take state_dict() before close()"
            )
        return self._engine

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def prepare(
    model: nn.Module,
    batch: Batch,
    *,
    precision: str = "fp32",
    optimizer: str | torch.optim.Optimizer = "adamw",
    param_groups: Sequence[Mapping[str, Any]] = (),
    lr: float = 1e-3,
    optimizer_arguments: Mapping[str, Any] | None = None,
    solver: str = "greedy_async",
    evaluate: bool = False,
    outputs: bool = False,
    dynamic: bool = True,
    disk: str = "",
    threads: int = 0,
    lane: str = "cpu",
    micro_batches: int = 1,
    loss: str = "auto",
    accumulate: int = 1,
    max_grad_norm: float = 0.0,
    skip_limit: int = 0,
    loss_scale: Mapping[str, Any] | None = None,
) -> Prepared:
    """Traces and profiles `model` on `batch`, whose sizes are the largest that steps may have.

    Args:
        precision: "fp32" | "bf16" | "fp16".
        optimizer: "adamw", "adam", "sgd", "adagrad", a class by import path, or a new torch optimizer of
            the model's parameters: its class, settings and groups are taken.
        param_groups: As `optimizer.groups` of the command: each with a `pattern` of parameter names and
            settings of its own.
        optimizer_arguments: What the optimizer takes beside lr: betas, eps, weight_decay (0.01 for
            adamw and 0 for all others, as for the command), ...
        evaluate: Whether `Session.evaluate` will be used; the model is then traced in that mode too.
        outputs: Whether `Session.forward` will be used, and `evaluate`; an evaluation then keeps all that the
            model returns to its end, so that it may take more memory.
        dynamic: Whether smaller batches and shorter sequences may come.
        disk: Folder of the disk tier; "": the user's cache folder.
        threads: Threads of operators, set for the whole process; 0: as they are.
        lane: "cpu", or "adversarial" for tests.
        micro_batches: Slices that each step's batch is cut into; their gradients add up to the batch's.
        loss: How the losses of slices make the batch's: "mean" over rows, "token_mean" over targets that
            are not ignored, "sum", or "auto": found out, and refused where they do not.
        accumulate: Batches whose gradients may add up before an update: 1, or more for any number
            (`Session.step_over`, or `backward` and `apply`).
        max_grad_norm: 2-norm to which all gradients together are scaled down; 0: as they are.
        skip_limit: Steps in a row that may be skipped for inf or nan in a gradient, see `TrainConfig`.
        loss_scale: Of fp16, see `LossScaleConfig`.

    Raises:
        TraceError: The model cannot be traced exactly.
        ConfigError: A setting cannot be used.
    """
    config = RunConfig(
        model=ModelConfig(name=type(model).__name__, source="module", target="live.Module"),
        data=DataConfig(name="random", batch_size=max(1, micro_batches)),
        train=TrainConfig(micro_batches, loss, accumulate, max_grad_norm, skip_limit),
        loss_scale=LossScaleConfig(**(loss_scale or {})),
        optimizer=(
            optimizer_settings(optimizer, lr, optimizer_arguments or {}, param_groups)
            if isinstance(optimizer, str)
            else settings_of_instance(optimizer, model)
        ),
        solver=SolverConfig(name=solver),
        device=DeviceConfig(name="cpu", threads=threads),
        tiers=TiersConfig(disk=disk),
        runtime=RuntimeConfig(lane=lane),
        precision=precision,
    )
    structure = BatchStructure(model, batch)
    args, kwargs = arguments(batch)
    settings = {"precision": precision, "dynamic": dynamic}
    graphs = [trace.trace_module(model, args, kwargs, mode="train", only_loss=True, **settings)]
    output = None
    if evaluate or outputs:
        graph, output = trace.trace_with_outputs(
            model, args, kwargs, mode="eval", only_loss=not outputs, **settings
        )
        graphs.append(graph)
    # evaluation takes a batch as it is
    whole = replace(config, train=TrainConfig())
    measured = [
        _in_this_process(profile.run(own, graph)) for own, graph in zip((config, whole), graphs, strict=False)
    ]
    evaluation = (graphs[1], measured[1]) if len(graphs) > 1 else None
    return Prepared(config, graphs[0], measured[0], evaluation, structure, output)


def offload(model: nn.Module, batch: Batch, budget: str | int, **settings: Any) -> Session:
    """Plans `model` inside `budget` and opens a session that trains it.

    Args:
        model: In any state; its tensors are the initial values.
        batch: A batch of the largest sizes to come: keyword arguments as a mapping, or positional ones.
        budget: Size of the device tier: "2GB", "800MiB" or bytes. On CPU it covers the whole process.
        settings: As for `prepare`.

    Raises:
        InfeasibleBudgetError: No plan fits; carries the least budget.
        TraceError: The model cannot be traced exactly.
    """
    prepared = prepare(model, batch, **settings)
    return Session(model, prepared, prepared.plan(budget))


def _in_this_process(costs: Costs) -> Costs:
    """Costs for training here, where the caller's own tensors and libraries are in memory already."""
    baseline = max(costs.baseline_bytes, memory.resident_bytes())
    return msgspec.structs.replace(costs, baseline_bytes=baseline, stage_peak_bytes={})


def _live_values(model: nn.Module, graph: g.RegionGraph) -> Iterator[tuple[str, torch.Tensor]]:
    held = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for parameter in graph.parameters:
        if parameter.literal is not None:
            yield parameter.name, decode_literal(parameter)
            continue
        tensor = held.get(parameter.name)
        shape = [g.evaluate_size(size, {}) for size in parameter.spec.shape]
        if tensor is None or list(tensor.shape) != shape:
            found = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
            raise ConfigError(
                f"the model has {found} at {parameter.name}; the planned one has shape {shape} there. "
                f"Give the model that was planned",
                key="model",
                found=found,
                expected=str(shape),
            )
        yield parameter.name, tensor.detach()
