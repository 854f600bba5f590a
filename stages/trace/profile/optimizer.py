"""What the optimizer's update costs, and what it keeps of each parameter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from stages.artifacts import graph as g
from stages.artifacts.costs import OptimizerCost, StateSpec
from stages.optim.groups import Groups
from stages.optim.kernel import CHUNK_MULTIPLE, UpdateKernel
from stages.optim.norms import gradient_norm
from stages.region import operators
from stages.trace.profile.peak import PeakGauge

#: of a chunk that is timed: more than caches hold, yet small beside any budget
_CHUNK_ELEMENTS = 2 * 2**20
_REPEATS = 9
#: chunks that are updated in turn, so that none is in a cache when its turn comes again
_MOST_SETS = 8
#: weight, gradient, master and the two states of Adam at most
_BYTES_PER_ELEMENT = 20
_HALF_PRECISION = ("float16", "bfloat16")


@dataclass(frozen=True)
class _Subject:
    """A made-up parameter to update, in the dtypes of the graph's parameters."""

    shape: tuple[int, ...]
    weight_dtype: torch.dtype

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def measure_optimizer(
    graph: g.RegionGraph,
    kernel: UpdateKernel,
    gauge: PeakGauge,
    *,
    room_bytes: int = 0,
    groups: Groups | None = None,
) -> OptimizerCost:
    """Times updates of a chunk in memory, with the norm of its gradient that the runtime takes before,
    and of the smallest size for their latency.

    Args:
        groups: Whose kernels may keep other state of their parameters; None: `kernel` has them all.
        room_bytes: What several chunks may take together; one is measured in any case.
    """
    large, small = _subjects(graph, kernel)
    with torch.random.fork_rng(devices=[]):
        large_ns, workspace_bytes = _measure(kernel, large, gauge, room_bytes)
        small_ns = _measure(kernel, small, gauge, 0)[0]
    # the smallest update is all latency, unless both are about equal
    spent_ns = max(large_ns - small_ns, large_ns // 2, 1)
    return OptimizerCost(
        implementation=kernel.implementation,
        chunkable=kernel.chunkable,
        elements_per_s=max(1, int(large.elements * 1e9 / spent_ns)),
        latency_ns=min(small_ns, large_ns // 2),
        states=state_specs(graph, groups or kernel),
        workspace_bytes_per_element=round(workspace_bytes / large.elements),
    )


def _trained(graph: g.RegionGraph) -> list[g.Parameter]:
    return [p for p in graph.parameters if p.role == "parameter" and p.requires_grad]


def _shape(parameter: g.Parameter) -> tuple[int, ...]:
    return tuple(g.evaluate_size(size, {}) for size in parameter.spec.shape)


def _subjects(graph: g.RegionGraph, kernel: UpdateKernel) -> tuple[_Subject, _Subject]:
    """A large and a small one: chunks, or for kernels that take no chunks, shapes of the model."""
    trained = _trained(graph)
    dtype = operators.dtype(trained[0].spec.dtype) if trained else torch.float32
    if kernel.chunkable or not trained:
        return _Subject((_CHUNK_ELEMENTS,), dtype), _Subject((CHUNK_MULTIPLE,), dtype)
    shapes = sorted((_shape(parameter) for parameter in trained), key=math.prod)
    fitting = [shape for shape in shapes if math.prod(shape) <= _CHUNK_ELEMENTS]
    return _Subject((fitting or shapes)[-1 if fitting else 0], dtype), _Subject(shapes[0], dtype)


def _measure(kernel: UpdateKernel, subject: _Subject, gauge: PeakGauge, room_bytes: int) -> tuple[int, int]:
    """Nanoseconds of one update, and its peak memory beyond weight, master, gradient and state."""
    device = gauge.device
    updates = [_update(kernel, subject, device.target)]
    updates[0]()
    workspace_bytes = gauge.peak_of(updates[0])[1]
    fitting = min(_MOST_SETS, room_bytes // (subject.elements * _BYTES_PER_ELEMENT))
    updates += [_update(kernel, subject, device.target) for _ in range(1, fitting)]
    for update in updates:
        update()
    times = []
    for repeat in range(max(_REPEATS, 2 * len(updates))):
        device.synchronize()
        start = time.perf_counter_ns()
        updates[repeat % len(updates)]()
        device.synchronize()
        times.append(time.perf_counter_ns() - start)
    return int(median(times)), workspace_bytes


def _update(kernel: UpdateKernel, subject: _Subject, device: torch.device) -> Callable[[], None]:
    """An update of tensors of its own, after the norm of the gradient."""
    master = torch.randn(subject.elements, device=device).mul_(0.02)
    gradient = torch.randn(subject.elements, device=device).mul_(0.02).to(subject.weight_dtype)
    made = kernel.init_state("profile", master.view(subject.shape))
    states = {name: state.to(device) for name, state in made.items()}
    shape = subject.shape
    if gradient.dtype == master.dtype:

        def whole() -> None:
            gradient_norm(gradient)
            kernel.update(master, gradient, states, 1, 1e-3, shape=shape)

        return whole
    weight = master.to(subject.weight_dtype)

    def low_precision() -> None:
        gradient_norm(gradient)
        kernel.update_low_precision(weight, master, gradient, states, 1, 1e-3, inverse_scale=0.5, shape=shape)

    return low_precision


def state_specs(graph: g.RegionGraph, kernel: UpdateKernel | Groups) -> dict[str, list[StateSpec]]:
    """Specs per parameter; under bf16 and fp16 the optimizer works on the fp32 master."""
    return {
        parameter.name: kernel.of(parameter.name).state_specs(
            _shape(parameter), "float32" if parameter.spec.dtype in _HALF_PRECISION else parameter.spec.dtype
        )
        for parameter in _trained(graph)
    }
