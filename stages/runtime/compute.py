"""The compute lane's instructions: forward, recompute, backward, update, evaluate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite

import torch

from stages.artifacts import graph as g
from stages.artifacts.plan import Buffer, Instruction
from stages.device.interface import Device
from stages.optim.groups import Rates
from stages.optim.norms import PIECE_ELEMENTS, gradient_norm
from stages.region import autograd
from stages.region.interpreter import RegionFunction
from stages.region.sums import add_gradient, summed_in_engine
from stages.runtime.completes import COMPLETES_NOTHING, Completes
from stages.runtime.draws import drawing
from stages.runtime.state import (
    MicroBatch,
    MicroState,
    StepState,
    TrainingState,
    flat,
    in_order_of,
    integers,
    numel,
)


@dataclass(frozen=True)
class StepSettings:
    """What may change between steps."""

    #: None: nothing is updated
    rates: Rates | None = None
    loss_scale: float = 1.0
    #: by which clipping multiplies every unscaled gradient
    factor: float = 1.0
    #: whether norms are those of whole fp32 copies of gradients
    whole_norms: bool = False


class Compute:
    """Carries out compute instructions of one graph on the training state.

    Args:
        graph: Training or evaluation graph.
        state: Weights and buffers, shared by both graphs.
        device: Where regions run.
        constants: Tensors of this graph alone. The evaluation graph numbers its constants anew, so
            that a name may stand for another value in the training graph.
    """

    def __init__(
        self,
        graph: g.RegionGraph,
        state: TrainingState,
        device: Device,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._graph = graph
        self._device = device
        self._constants = {name: tensor.to(device.target) for name, tensor in (constants or {}).items()}
        self._state = state
        self._functions = [RegionFunction(graph, region, device.target) for region in graph.regions]
        self._value_requires_grad = {value.name for value in graph.values if value.requires_grad}
        self._seeded = [summed_in_engine(graph, region) for region in graph.regions]
        self._region_index = {region.name: index for index, region in enumerate(graph.regions)}
        self._seeded_somewhere = frozenset[str]().union(*self._seeded)
        self.step = StepState()
        self.settings = StepSettings()

    def begin(self, batches: Sequence[MicroBatch], settings: StepSettings, *, further: bool = False) -> None:
        """Takes a batch.

        Args:
            further: Gradients of earlier batches stay, and this one's are added to them.
        """
        before = self.step
        self.step = StepState([MicroState(batch, dict(batch.inputs)) for batch in batches])
        if further:
            self.step.gradients = before.gradients
            self.step.away = {
                buffer: layout
                for buffer, layout in before.away.items()
                if self._state.buffers[buffer].role == "gradient"
            }
        self.settings = settings

    def end(self) -> None:
        """Lets go of everything that the step held."""
        self.step = StepState()

    def perform(self, instruction: Instruction, completes: Completes = COMPLETES_NOTHING) -> None:
        """Runs one instruction.

        Args:
            completes: Gradients that are complete once this backward has run.
        """
        empty = bool(self.step.micro) and self.step.micro[instruction.micro_batch].batch.empty
        match instruction.operation:
            case "forward" | "recompute" if empty:
                pass
            case "forward":
                self._forward(instruction)
            case "recompute":
                self._recompute(instruction)
            case "backward":
                if not empty:
                    self._backward(instruction, completes.of_micro_batch)
                for name in completes.of_step:
                    self._check(name)
            case "update":
                self._update(instruction)
            case "evaluate":
                self._evaluate(instruction)
            case "free":
                pass
            case other:
                raise ValueError(f"the compute lane cannot {other}")

    @property
    def graph(self) -> g.RegionGraph:
        return self._graph

    def region_index(self, name: str) -> int:
        return self._region_index[name]

    # forward and backward

    def lookup(self, name: str, micro_batch: int = 0) -> torch.Tensor:
        """The present tensor of a weight, buffer or value."""
        if name in self._constants:
            return self._constants[name]
        if name in self._state.weights:
            return self._state.weights[name]
        if name in self._state.persistent:
            return self._state.persistent[name]
        return self.step.micro[micro_batch].values[name]

    def _tensors(self, region: g.Region, micro_batch: int) -> dict[str, torch.Tensor]:
        return {name: self.lookup(name, micro_batch) for name in (*region.inputs, *region.parameters)}

    def _gradients_of(self, region: g.Region) -> frozenset[str]:
        values = {name for name in region.inputs if name in self._value_requires_grad}
        return frozenset(values | set(region.gradients))

    def _forward(self, instruction: Instruction) -> None:
        region, micro = self._graph.regions[instruction.region], self._micro(instruction)
        keep = instruction.mode == "keep"
        if not keep:
            micro.buffers_before[instruction.region] = {
                name: self._state.persistent[name].clone() for name in region.mutates
            }
        draws = self.step.draws.get((instruction.micro_batch, instruction.region))
        with drawing(draws, region.name, self._device):
            if region.random and not keep:
                micro.rng[instruction.region] = self._device.rng_state()
            tensors = self._tensors(region, instruction.micro_batch)
            outputs, tape = self._run(instruction, tensors, keep=keep)
        if keep:
            micro.tapes[instruction.region] = tape
        self._take_outputs(instruction, outputs)

    def _micro(self, instruction: Instruction) -> MicroState:
        return self.step.micro[instruction.micro_batch]

    def _run(
        self, instruction: Instruction, tensors: dict[str, torch.Tensor], *, keep: bool
    ) -> tuple[dict[str, torch.Tensor], autograd.Tape]:
        return autograd.forward(
            self._functions[instruction.region],
            tensors,
            self._micro(instruction).batch.sizes,
            gradients_of=self._gradients_of(self._graph.regions[instruction.region]),
            keep=keep,
            lookup=partial(self.lookup, micro_batch=instruction.micro_batch),
        )

    def _take_outputs(self, instruction: Instruction, outputs: dict[str, torch.Tensor]) -> None:
        """Keeps the outputs that the program has buffers for, and the loss."""
        micro = self._micro(instruction)
        if self._graph.loss in outputs:
            micro.loss = outputs[self._graph.loss].clone()
        buffers = self._state.buffers
        written = {buffers[access.buffer].owner for access in instruction.writes}
        for name, output in outputs.items():
            if name in written:
                micro.values[name] = output

    def _recompute(self, instruction: Instruction) -> None:
        """Forward again for its activations, as the first time; RNG and buffers do not notice."""
        region, micro = self._graph.regions[instruction.region], self._micro(instruction)
        tensors = self._tensors(region, instruction.micro_batch)
        tensors.update(micro.buffers_before.pop(instruction.region, {}))
        now = self._device.rng_state() if region.random else None
        if now is not None:
            self._device.set_rng_state(micro.rng.pop(instruction.region))
        try:
            _, tape = self._run(instruction, tensors, keep=True)
        finally:
            if now is not None:
                self._device.set_rng_state(now)
        micro.tapes[instruction.region] = tape

    def _backward(self, instruction: Instruction, completes: tuple[str, ...]) -> None:
        region, micro = self._graph.regions[instruction.region], self._micro(instruction)
        tape = micro.tapes.pop(instruction.region)
        received = {
            name: micro.value_gradients[name] for name in tape.outputs if name in micro.value_gradients
        }
        if self._graph.loss in tape.outputs:
            received[self._graph.loss] = self._loss_gradient(micro, received.get(self._graph.loss))
        sums = {name: micro.value_gradients[name] for name in region.inputs if name in micro.value_gradients}
        for name in self._seeded[instruction.region]:
            if name in micro.gradients:
                sums[name] = micro.gradients.pop(name)
        gradients = autograd.backward(tape, received, sums)
        del tape, received, sums
        for name in list(gradients):
            self._take_gradient(micro, name, gradients.pop(name), instruction.region)
        for name in completes:
            self._join(micro, name)

    def _loss_gradient(self, micro: MicroState, later: torch.Tensor | None) -> torch.Tensor:
        """What `(loss.float() * scale * weight).backward()` sends to the loss."""
        assert micro.loss is not None, "backward of the loss before its forward"
        factor = self.settings.loss_scale * micro.batch.weight
        seed = torch.full_like(micro.loss, 1.0)
        if factor != 1.0:
            seed = torch.full_like(micro.loss, factor, dtype=torch.float32).to(micro.loss.dtype)
        return seed if later is None else seed + later

    def _take_gradient(
        self, micro: MicroState, name: str, gradient: torch.Tensor | None, region: int
    ) -> None:
        if gradient is None:
            return
        if name in self._value_requires_grad:
            micro.value_gradients[name] = gradient
        elif name not in micro.gradients or name in self._seeded[region]:
            micro.gradients[name] = gradient
        else:
            shared = name in self._seeded_somewhere
            micro.gradients[name] = add_gradient(micro.gradients[name], gradient, shares_memory=shared)

    def _join(self, micro: MicroState, name: str) -> None:
        """Adds a micro-batch's gradient to the sum, as `.grad` does over several backward calls."""
        gradient = micro.gradients.pop(name, None)
        if gradient is None:
            return
        so_far = self.step.gradients.get(name)
        if so_far is not None:
            shared = name in self._seeded_somewhere
            gradient = add_gradient(so_far, gradient, shares_memory=shared)
        self.step.gradients[name] = gradient

    def _check(self, name: str) -> None:
        """Norm and finiteness of a complete gradient."""
        gradient = self.step.gradients.get(name)
        if gradient is None:
            return
        spec = self._state.parameters[name].spec
        gradient = self.step.gradients[name] = in_order_of(gradient, spec)
        norm = gradient_norm(flat(gradient, spec), whole=self.settings.whole_norms)
        self.step.norms[name] = norm
        # squares overflow before their terms do: only the elements tell
        if not isfinite(norm) and not _is_finite(gradient):
            self.step.non_finite.append(name)

    # update

    def _update(self, instruction: Instruction) -> None:
        """The optimizer on elements [start, start + count) of one parameter."""
        name = instruction.parameter
        gradient = self._gradient_piece(instruction)
        if gradient is None or self.step.non_finite:
            return  # nothing reached this parameter: eager leaves it alone too; or the step is lost
        weight = self._piece(instruction, "weight")
        assert weight is not None, f"update of {name} without its weight"
        master = self._piece(instruction, "master")
        states = {
            buffer.state: self._slice(buffer, instruction)
            for buffer in self._touched(instruction)
            if buffer.role == "state"
        }
        parameter = self._state.parameters[name]
        shape, stride = integers(parameter.spec.shape), integers(parameter.spec.stride)
        count = self._state.update_counts.get(name, 0) + 1
        assert self.settings.rates is not None, f"update of {name} in a phase that updates nothing"
        kernel, rate = self.settings.rates.of(name)
        factor = self.settings.factor
        if master is None:
            if factor != 1.0:
                gradient = gradient * factor  # in place, it might scale another parameter's too
            kernel.update(weight, gradient, states, count, rate, shape=shape, stride=stride)
            return
        kernel.update_low_precision(
            weight,
            master,
            gradient,
            states,
            count,
            rate,
            inverse_scale=1.0 / self.settings.loss_scale,
            factor=factor,
            shape=shape,
            stride=stride,
        )

    def _gradient_piece(self, instruction: Instruction) -> torch.Tensor | None:
        name = instruction.parameter
        if name not in self.step.norms:
            return None
        start, stop = instruction.start, instruction.start + instruction.count
        for buffer in self._touched(instruction):
            if buffer.role == "gradient" and buffer.offset is not None:
                return self._slice(buffer, instruction)
        gradient = self.step.gradients[name]
        return flat(gradient, self._state.parameters[name].spec)[start:stop]

    def _touched(self, instruction: Instruction) -> list[Buffer]:
        """Buffers of the instruction's parameter that it reads or writes, each once."""
        ids = dict.fromkeys(access.buffer for access in (*instruction.reads, *instruction.writes))
        return [self._state.buffers[buffer] for buffer in ids]

    def _piece(self, instruction: Instruction, role: str) -> torch.Tensor | None:
        for buffer in self._touched(instruction):
            if buffer.role == role:
                return self._slice(buffer, instruction)
        return None

    def _slice(self, buffer: Buffer, instruction: Instruction) -> torch.Tensor:
        slot = self._state.slot(buffer)
        spec = self._state.parameters[instruction.parameter].spec
        if slot.numel() != numel(spec) and buffer.role == "state" and instruction.count == numel(spec):
            return slot  # a whole parameter's state need not be of the parameter's size
        start = instruction.start - buffer.start
        return slot[start : start + instruction.count]

    # evaluation

    def _evaluate(self, instruction: Instruction) -> None:
        region = self._graph.regions[instruction.region]
        with torch.no_grad():
            tensors = self._tensors(region, instruction.micro_batch)
            outputs = self._functions[instruction.region](tensors, self._micro(instruction).batch.sizes)
            self._return(instruction, outputs, {tensors[name] for name in region.parameters})
        self._take_outputs(instruction, outputs)

    def _return(
        self, instruction: Instruction, outputs: Mapping[str, torch.Tensor], weights: Iterable[torch.Tensor]
    ) -> None:
        """Keeps what the caller gets; the memory of weights is not his, and soon another's."""
        places = {tensor.untyped_storage().data_ptr() for tensor in weights}
        micro = self._micro(instruction)
        for spec in self._graph.outputs:
            if (output := outputs.get(spec.name)) is not None:
                own = output.untyped_storage().data_ptr() not in places
                micro.returned[spec.name] = output if own else output.clone()


def _is_finite(gradient: torch.Tensor) -> bool:
    pieces = gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset()).split(PIECE_ELEMENTS)
    return all(bool(torch.isfinite(piece).all()) for piece in pieces)
