"""Cost of one region kind, measured alone: nothing of the model but this region is in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import RegionCost
from stages.device.cpu import Cpu
from stages.device.interface import Device
from stages.region import autograd
from stages.region.interpreter import RegionFunction
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.stand_ins import Case, gradient_like, region_tensors

Result = TypeVar("Result")
_CPU = Cpu()


class Bench:
    """One region with stand-in tensors, ready to run."""

    def __init__(self, graph: g.RegionGraph, case: Case, device: Device = _CPU) -> None:
        self._case = case
        self.device = device
        self.kind = case.region.kind
        self._sizes = g.planned_sizes(graph)
        self._function = RegionFunction(graph, case.region, device.target)
        self.tensors = region_tensors(graph, case.region, device.target)
        self.sums: dict[str, torch.Tensor] = {}
        self.received: dict[str, torch.Tensor] = {}

    def forward(self, *, keep: bool) -> tuple[dict[str, torch.Tensor], autograd.Tape]:
        return autograd.forward(
            self._function,
            self.tensors,
            self._sizes,
            gradients_of=self._case.gradients_of,
            keep=keep,
            lookup=self.tensors.__getitem__,
        )

    def backward(self, tape: autograd.Tape) -> dict[str, torch.Tensor | None]:
        return autograd.backward(tape, self.received, self.sums)

    def run_timed(self) -> tuple[int, int]:
        """Forward and backward once; nanoseconds of each."""
        (outputs, tape), forward_ns = timed(lambda: self.forward(keep=True), self.device)
        self.receive(outputs, tape)
        del outputs
        gradients, backward_ns = timed(lambda: self.backward(tape), self.device)
        del gradients
        return forward_ns, backward_ns

    def new_storages(self, tensors: Iterable[torch.Tensor | None]) -> list[torch.UntypedStorage]:
        """Storages of `tensors`, each once, without those that were there before."""
        before = {
            tensor.untyped_storage()._cdata
            for group in (self.tensors, self.received, self.sums)
            for tensor in group.values()
        }
        found = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage()
            for tensor in tensors
            if tensor is not None
        }
        return [storage for key, storage in found.items() if key not in before]

    def receive(self, outputs: dict[str, torch.Tensor], tape: autograd.Tape) -> None:
        """Makes the gradients that later regions would have sent by now."""
        if self.received:
            return
        names = [name for name in outputs if name in tape.outputs and name in self._case.received]
        self.received = {name: gradient_like(outputs[name]) for name in names}
        self.sums = {name: gradient_like(self.tensors[name]) for name in sorted(self._case.sums)}


def measure_region(graph: g.RegionGraph, case: Case, gauge: PeakGauge) -> RegionCost:
    """Runs the region a few times: to warm up, for its memory, and once for a first idea of its time
    (`rounds` measures that properly).

    The default generator is left as found.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _measure(Bench(graph, case, gauge.device), gauge)


def _measure(bench: Bench, gauge: PeakGauge) -> RegionCost:
    bench.run_timed()  # pays for page tables and kernel caches
    (outputs, tape), forward_peak = gauge.peak_of(lambda: bench.forward(keep=True))
    made = bench.new_storages(outputs.values())
    saved = tape.storages()
    # small blocks may not move the high-water mark, but are held all the same
    forward_floor = sum({storage._cdata: storage.nbytes() for storage in [*made, *saved]}.values())
    output_bytes = sum(storage.nbytes() for storage in made)
    saved_sizes = [storage.nbytes() for storage in saved]
    # From here on outputs are counted by their readers, and what autograd saved must be free to go.
    outputs.clear()
    del made, saved
    gradients, backward_peak = gauge.peak_of(lambda: bench.backward(tape))
    gradient_bytes = sum(storage.nbytes() for storage in bench.new_storages(gradients.values()))
    gradients.clear()
    dropped, dropped_peak = gauge.peak_of(lambda: bench.forward(keep=False))
    dropped[0].clear()
    forward_ns, backward_ns = bench.run_timed()
    return RegionCost(
        kind=bench.kind,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        saved_bytes=sum(saved_sizes),
        saved_storages=saved_sizes,
        forward_peak_bytes=max(forward_peak, forward_floor),
        dropped_forward_peak_bytes=max(dropped_peak, output_bytes),
        backward_peak_bytes=max(backward_peak, gradient_bytes - sum(saved_sizes)),
    )


def timed(work: Callable[[], Result], device: Device = _CPU) -> tuple[Result, int]:
    device.synchronize()
    start = time.perf_counter_ns()
    result = work()
    device.synchronize()
    return result, time.perf_counter_ns() - start
