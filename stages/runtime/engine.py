"""Training steps on a plan: weights in their tiers, one batch in, one loss out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError, StageError
from stages.artifacts.plan import Buffer, Instruction, Phase, Plan
from stages.artifacts.timeline import Event
from stages.optim.groups import Groups, PlannedOptimizer, Rates
from stages.optim.norms import total_norm
from stages.optim.scaler import LossScaler
from stages.region.initial import literal_constants
from stages.runtime import sizes, transfers
from stages.runtime.completes import COMPLETES_NOTHING, gradients_completed_by
from stages.runtime.compute import Compute, StepSettings
from stages.runtime.draws import follows_a_plain_loop, rehearse
from stages.runtime.guard import Guard
from stages.runtime.homes import Homes
from stages.runtime.lanes.issuing import Issuing
from stages.runtime.lanes.lane_set import LaneSet, Timing
from stages.runtime.placing import Placing
from stages.runtime.slices import Slicer
from stages.runtime.state import MicroBatch, MicroState, TrainingState
from stages.runtime.tiers.arena import POISON, Arena
from stages.runtime.tiers.beyond import Tiers
from stages.training import LossScaleConfig, TrainConfig


@dataclass(frozen=True)
class StepResult:
    """What one step gave.

    grad_norm: of the unscaled gradients before they were clipped; None when the step was skipped.
    non_finite: parameters with inf or nan in their gradient, in the order of the backward.
    loss_scale: that the gradients were made with; 1 where there is none.
    learning_rates: of each param group, used or, where the step was skipped, left unused.
    """

    loss: float
    grad_norm: float | None
    skipped: bool
    non_finite: tuple[str, ...] = ()
    loss_scale: float = 1.0
    learning_rates: tuple[float, ...] = ()
    events: list[Event] = field(default_factory=list)
    moved_bytes: dict[str, int] = field(default_factory=dict)  # "read", "write"


class Engine:
    """Holds the training state in its tiers and runs the plan's phases.

    Args:
        graph: The traced model.
        plan: A verified plan for it.
        kernel: The optimizer's update of each param group.
        tiers: The device and what lies beyond it, as large as the plan says.
        lanes: Who carries out transfers.
        poison: Whether memory that the plan calls free or not yet filled is overwritten with NaN and
            out-of-range integers (tests): what reads it then goes wrong every time.
        evaluation: The graph of the model in evaluation mode, where the plan has that phase.
        train: What happens before an update.
        loss_scale: How fp16's moves.

    Raises:
        ArtifactError: The plan was made for updates that wait for less than these do.
    """

    def __init__(
        self,
        graph: g.RegionGraph,
        plan: Plan,
        kernel: Groups,
        tiers: Tiers,
        lanes: LaneSet,
        evaluation: g.RegionGraph | None = None,
        *,
        train: TrainConfig | None = None,
        loss_scale: LossScaleConfig | None = None,
        poison: bool = False,
    ) -> None:
        self.graph = graph
        self._guard = Guard(graph, plan, train or TrainConfig(), loss_scale)
        self.plan = plan
        #: settings of each group, which schedulers change
        self.optimizer = PlannedOptimizer(kernel)
        self._lanes = lanes
        self.device = tiers.device
        self._tiers = tiers
        self._arena = Arena(plan.arena_bytes, self.device.target if self.device.beside_host else None)
        self._state = TrainingState(graph, plan, self._arena)
        self._placing = Placing(graph, self._state, kernel, tiers.homes, self.device.target)
        self._transfers = transfers.Transfers(self._state, tiers.links, self.device)
        self._training = Compute(graph, self._state, self.device)
        self._evaluation = (
            None
            if evaluation is None
            else Compute(evaluation, self._state, self.device, literal_constants(evaluation))
        )
        self._slicer = Slicer(graph, plan.placement.micro_batches, plan.loss)
        self._phases = {phase.name: phase for phase in plan.phases}
        self._plain = follows_a_plain_loop(self._phases["step"])
        self._completed = {
            name: gradients_completed_by(phase, self._state.buffers) for name, phase in self._phases.items()
        }
        self._poison = poison
        if poison:
            self._arena.poison(0, plan.arena_bytes)
        #: of the step under way: what has run, its loss, and its batches
        self._events: list[Event] = []
        self._total_loss = 0.0
        self._calls = 0
        self._started_ns = 0
        #: of the step, what passed between an accelerator and the disk; each has one writer
        self._far_bytes = {"disk_read": 0, "disk_write": 0}
        #: bytes moved by each instruction of the phase under way; each has one writer
        self._moved: dict[int, int] = {}

    def load(self, initial: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Puts initial values where the plan has them, one tensor at a time; resets the optimizer.

        Args:
            initial: (name, tensor before the precision cast) for every parameter, buffer and constant.
        """
        self._placing.load(initial)

    def weights(self) -> Iterator[tuple[g.Parameter, torch.Tensor]]:
        """Parameters and buffers, one in memory at a time, between steps."""
        return self._placing.weights(("parameter", "buffer"))

    def homes(self) -> Homes:
        """The whole training state by name, between steps."""
        self._require_no_gradients("the training state is asked for")
        return Homes(self.graph, self._state, self._tiers.homes, self.device)

    @property
    def update_counts(self) -> dict[str, int]:
        """Completed updates of each parameter, which bias corrections read."""
        return dict(self._state.update_counts)

    def restore(self, fill: Callable[[Homes], None], update_counts: Mapping[str, int]) -> None:
        """Takes a training state in place of initial values.

        Args:
            fill: Fills every tensor of the homes that it gets.
        """
        fill(self.homes())
        self._placing.filled()
        self._state.update_counts.clear()
        self._state.update_counts.update(update_counts)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of fp16."""
        return self._guard.scaler

    @property
    def guard(self) -> Guard:
        """What stands between gradients and their update."""
        return self._guard

    def step(self, batch: Mapping[str, torch.Tensor], learning_rate: float | None = None) -> StepResult:
        """One training step on one batch: forward, backward, update.

        Args:
            batch: Every input by name, sizes at most those planned.
            learning_rate: Of all groups; None: what `optimizer` has.

        Raises:
            DataError: The batch does not fit the plan; nothing has changed then.
            NumericsError: Gradients with inf or nan, in too many steps in a row.
        """
        return self.step_over([batch], learning_rate)

    def step_over(
        self, batches: Sequence[Mapping[str, torch.Tensor]], learning_rate: float | None = None
    ) -> StepResult:
        """One step on several batches, whose losses count equally; raises as `step`."""
        rates = self.optimizer.rates(learning_rate)
        for batch in batches:
            self._backward(batch, 1.0 / len(batches), rates)
        return self._apply(rates)

    def backward(self, batch: Mapping[str, torch.Tensor], weight: float = 1.0) -> float:
        """Forward and backward of `loss * weight`; gradients add up until `apply`. The loss, unweighted.

        Raises:
            ConfigError: The plan updates inside backward, or has no phase for a second batch.
            DataError: The batch does not fit the plan; gradients are as they were then.
        """
        if "update" not in self._phases:
            raise ConfigError(
                "this plan updates inside backward; expected one for several backward calls. Plan with "
                "accumulate above 1",
                key="train.accumulate",
            )
        return self._backward(batch, weight, None)

    def apply(self, learning_rate: float | None = None) -> StepResult:
        """The update from what `backward` has added up.

        Raises:
            StageError: There was no backward since the last one.
            NumericsError: As for `step`.
        """
        if not self._calls:
            raise StageError("an update without gradients; expected at least one backward call before it")
        return self._apply(self.optimizer.rates(learning_rate))

    def _backward(self, batch: Mapping[str, torch.Tensor], weight: float, rates: Rates | None) -> float:
        self._guard.require_sound()
        further = self._calls > 0
        if further and "accumulate" not in self._phases:
            raise ConfigError(
                f"a second batch before the update; this plan has one batch a step. Plan with "
                f"accumulate={self._calls + 1} or more",
                key="train.accumulate",
                found=str(self._calls + 1),
                expected="1",
            )
        bound = sizes.bind(self.graph, batch)
        batch = self._on_device(batch)
        settings = StepSettings(rates, self._guard.scale, whole_norms=self.plan.clips)
        cut = self._slicer.cut(batch, bound, self._training.lookup)
        slices = [replace(item, weight=item.weight * weight) for item in cut]
        self._training.begin(slices, settings, further=further)
        if not self._plain:
            self._training.step.draws = rehearse(self.graph, slices, self.device)
        if not further:
            self._started_ns = time.perf_counter_ns()
        self._calls += 1
        self._events += self._run("accumulate" if further else "step", self._training)
        micro = [item for item in self._training.step.micro if not item.batch.empty]
        self._total_loss += sum(item.batch.weight * self._loss(item) for item in micro)
        return sum(
            item.weight * self._loss(state)
            for item, state in zip(cut, self._training.step.micro, strict=True)
            if not item.empty
        )

    def _apply(self, rates: Rates) -> StepResult:
        """The update, unless a gradient forbids it."""
        step, guard = self._training.step, self._guard
        non_finite, scale = tuple(step.non_finite), guard.scale
        norm = total_norm(self._in_order(step.norms)) / scale
        if "update" in self._phases and not non_finite:
            self._training.settings = StepSettings(rates, scale, guard.factor(norm))
            self._events += self._run("update", self._training)
        result = self._finish(non_finite, None if non_finite else float(norm), scale, rates)
        guard.take(non_finite)
        return result

    def _finish(
        self, non_finite: tuple[str, ...], norm: float | None, scale: float, rates: Rates
    ) -> StepResult:
        step, events, loss = self._training.step, self._events, self._total_loss
        if not non_finite:
            for name in step.norms:
                self._state.update_counts[name] = self._state.update_counts.get(name, 0) + 1
        moved = {
            lane: sum(event.bytes for event in events if event.lane == lane) for lane in ("read", "write")
        }
        if self.device.beside_host:
            moved |= self._far_bytes
        self._training.end()
        self._events, self._total_loss, self._calls = [], 0.0, 0
        self._far_bytes = dict.fromkeys(self._far_bytes, 0)
        return StepResult(
            loss, norm, bool(non_finite), non_finite, scale, rates.learning_rates, events, moved
        )

    def _require_no_gradients(self, what: str) -> None:
        """Raises:
        StageError: Between a backward and its update, whose gradients no other phase expects.
        """
        if self._calls:
            raise StageError(f"{what} between a backward and its update; expected before or after both")

    def _in_order(self, norms: Mapping[str, float]) -> list[float]:
        """Norms of whole gradients in parameter order."""
        return [norms[name] for name in self._state.parameters if name in norms]

    @staticmethod
    def _loss(micro: MicroState) -> float:
        assert micro.loss is not None, "the program never ran the loss"
        return float(micro.loss)

    def evaluate(self, batch: Mapping[str, torch.Tensor]) -> float:
        """The loss in evaluation mode, without gradients; training state stays as it is."""
        micro = self._evaluated(batch)
        return self._loss(micro)

    def forward(self, batch: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """What the model returns in evaluation mode, in the graph's order, without gradients."""
        micro = self._evaluated(batch)
        assert self._evaluation is not None, "checked by _evaluated"
        return [
            micro.returned[spec.name] if spec.name in micro.returned else micro.batch.inputs[spec.name]
            for spec in self._evaluation.graph.outputs
        ]

    def _evaluated(self, batch: Mapping[str, torch.Tensor]) -> MicroState:
        if self._evaluation is None:
            raise ConfigError(
                "this plan has no evaluation phase; plan with eval.every above 0 to evaluate",
                key="eval.every",
            )
        self._require_no_gradients("an evaluation")
        self._started_ns = time.perf_counter_ns()
        bound = sizes.bind(self._evaluation.graph, batch)
        self._evaluation.begin([MicroBatch(self._on_device(batch), bound)], StepSettings())
        self._run("evaluate", self._evaluation)
        micro = self._evaluation.step.micro[0]
        self._evaluation.end()
        return micro

    def _run(self, name: str, compute: Compute) -> list[Event]:
        """Carries out a phase; its events in nanoseconds from the step's start."""
        phase = self._phases[name]
        completed = self._completed[name]
        self._moved = {}

        def perform(instruction: Instruction) -> None:
            if instruction.lane == "compute":
                compute.perform(instruction, completed.get(instruction.id, COMPLETES_NOTHING))
            else:
                moved, home = self._transfers.perform(instruction, compute)
                self._moved[instruction.id] = moved
                if home == "disk":
                    self._far_bytes[f"disk_{instruction.lane}"] += moved

        def free(buffer: int) -> list[torch.UntypedStorage]:
            return self._release(self._state.buffers[buffer], compute)

        streams = self._tiers.streams
        if streams is not None:
            issuing = Issuing(streams, phase.instructions, perform, free)
            self._lanes.run(phase.instructions, issuing.perform, lambda _: None)
            timings = issuing.finish()
            return [self._event(phase, compute.graph, timing, self._started_ns) for timing in timings]
        timings = self._lanes.run(phase.instructions, perform, lambda buffer: self._let_go(buffer, compute))
        return [self._event(phase, compute.graph, timing, self._started_ns) for timing in timings]

    def _event(self, phase: Phase, graph: g.RegionGraph, timing: Timing, started: int) -> Event:
        instruction = phase.instructions[timing.instruction]
        return Event(
            lane=timing.lane,
            name=describe(instruction, graph, self._state.buffers),
            start_ns=timing.start_ns - started,
            end_ns=timing.end_ns - started,
            bytes=self._moved.get(timing.instruction, 0),
        )

    def _let_go(self, buffer: int, compute: Compute) -> None:
        self._release(self._state.buffers[buffer], compute)

    def _release(self, buffer: Buffer, compute: Compute) -> list[torch.UntypedStorage]:
        """Ends a buffer's life; the memory that copies under way may still need."""
        if buffer.offset is None:
            return transfers.release(buffer, compute)
        if self._poison and self._tiers.streams is not None:
            self._tiers.streams.fill(self._arena.span(buffer.offset, buffer.bytes), POISON)
        elif self._poison:
            self._arena.poison(buffer.offset, buffer.bytes)
        return []

    def _on_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self.device.target) for name, tensor in batch.items()}

    def close(self) -> None:
        """Ends the lanes and gives memory and disk back. The engine cannot be used afterwards."""
        self._lanes.close()
        self._tiers.close()
        self._arena.close()


def describe(instruction: Instruction, graph: g.RegionGraph, buffers: Mapping[int, Buffer]) -> str:
    """A name for the timeline: what is done to what."""
    if instruction.parameter:
        return f"{instruction.operation} {instruction.parameter}"
    if instruction.region >= 0:
        return f"{instruction.operation} {graph.regions[instruction.region].name}"
    accesses = instruction.writes or instruction.reads
    if not accesses:
        return instruction.operation
    buffer = buffers[accesses[0].buffer]
    return f"{instruction.operation} {buffer.role} {buffer.owner}"
