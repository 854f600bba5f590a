"""Cost of one region kind without running it: its operators on tensors without memory, then a roofline.

Time of a kernel is the larger of its operations over the peak and its bytes over the bandwidth, plus
what starting it costs (Williams, Waterman and Patterson, "Roofline: an insightful visual performance
model for multicore architectures", 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from stages.artifacts import graph as g
from stages.artifacts.costs import RegionCost
from stages.region import autograd, shapes
from stages.region.interpreter import RegionFunction
from stages.trace.profile.roofline.recorder import Kernel, Recorder
from stages.trace.profile.stand_ins import Case, gradient_like, region_tensors

_CPU = torch.device("cpu")

#: nanoseconds of a kernel
Rate = Callable[[Kernel], float]


@dataclass(frozen=True)
class Work:
    """What a region does in one forward and one backward.

    Attributes:
        saved: Bytes of each storage that autograd keeps, in the order in which they were first saved.
        forward_peak_bytes, dropped_peak_bytes, backward_peak_bytes: As in RegionCost.
    """

    forward: list[Kernel]
    backward: list[Kernel]
    saved: list[int]
    forward_peak_bytes: int
    dropped_peak_bytes: int
    backward_peak_bytes: int


def region_cost(
    graph: g.RegionGraph, case: Case, rate: Rate, stand_ins: Mapping[str, Callable[..., object]]
) -> RegionCost:
    """The cost of `case` at the planned sizes.

    Args:
        rate: Of the device that is planned for.
        stand_ins: Operators that this device runs by another kernel than the processor here.
    """
    work = work_of(graph, case, stand_ins)
    return RegionCost(
        kind=case.region.kind,
        forward_ns=round(sum(map(rate, work.forward))),
        backward_ns=round(sum(map(rate, work.backward))),
        saved_bytes=sum(work.saved),
        saved_storages=work.saved,
        forward_peak_bytes=work.forward_peak_bytes,
        dropped_forward_peak_bytes=work.dropped_peak_bytes,
        backward_peak_bytes=work.backward_peak_bytes,
    )


def work_of(graph: g.RegionGraph, case: Case, stand_ins: Mapping[str, Callable[..., object]]) -> Work:
    """Runs the region on tensors without memory: forward, backward, and a forward that drops."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(), shapes.as_computed():
        run = _Run(graph, case, stand_ins)
        forward, saved, forward_peak, backward, backward_peak = run.keeping()
        dropped_peak = run.dropping()
    return Work(forward, backward, saved, forward_peak, dropped_peak, backward_peak)


class _Run:
    """A region with tensors without memory in place of its weights and inputs."""

    def __init__(
        self, graph: g.RegionGraph, case: Case, stand_ins: Mapping[str, Callable[..., object]]
    ) -> None:
        self._case = case
        self._sizes = g.planned_sizes(graph)
        self._function = RegionFunction(graph, case.region, _CPU, stand_ins)
        self._tensors = region_tensors(graph, case.region)

    def keeping(self) -> tuple[list[Kernel], list[int], int, list[Kernel], int]:
        """Kernels of forward, saved storages, forward's peak, kernels of backward, and its peak."""
        saved: dict[int, int] = {}
        recorder = Recorder(self._tensors.values())
        with recorder:
            outputs, tape = self._forward(self._keeping(saved))
        forward, forward_peak = recorder.kernels, recorder.peak_bytes
        names = [name for name in outputs if name in tape.outputs and name in self._case.received]
        received = {name: gradient_like(outputs[name]) for name in names}
        sums = {name: gradient_like(self._tensors[name]) for name in sorted(self._case.sums)}
        recorder.know([*received.values(), *sums.values()])
        outputs.clear()
        recorder.restart()
        with recorder:
            autograd.backward(tape, received, sums)
        sizes = list(saved.values())
        return forward, sizes, forward_peak, recorder.kernels, max(0, recorder.peak_bytes - sum(sizes))

    def dropping(self) -> int:
        """Peak of a forward that keeps nothing for backward."""
        recorder = Recorder(self._tensors.values())
        with recorder:
            self._forward(saved_tensors_hooks(lambda _: None, _refuse))
        return recorder.peak_bytes

    def _forward(self, hooks: autograd.Hooks) -> tuple[dict[str, torch.Tensor], autograd.Tape]:
        return autograd.forward(
            self._function,
            self._tensors,
            self._sizes,
            gradients_of=self._case.gradients_of,
            keep=True,
            lookup=self._tensors.__getitem__,
            hooks=hooks,
        )

    def _keeping(self, saved: dict[int, int]) -> autograd.Hooks:
        """Notes the storage of each saved tensor, unless it is a weight's or an input's (those have
        no address here, so that a storage is told by its identity)."""
        named = {
            (tensor.untyped_storage()._cdata, tensor.dtype)
            for tensor in self._tensors.values()
            if tensor.numel()
        }

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if (storage._cdata, tensor.dtype) not in named:
                saved.setdefault(storage._cdata, storage.nbytes())
            return tensor.detach()

        return saved_tensors_hooks(pack, lambda tensor: tensor)


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("activations were dropped in this forward")
