"""The random numbers that each forward of a step gets, whatever order the program has.

A plain loop with micro-batches draws for one micro-batch after another, through the whole model.
Where a program takes all micro-batches through a region before the next region, the generator's
state at each turn is found out before the step: the operators that draw are run alone, in the plain
loop's order, on stand-ins of the same shapes. How much is drawn does not depend on values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import StageError
from stages.artifacts.plan import Phase
from stages.device.interface import Device
from stages.region import operators
from stages.region.interpreter import decode, node_references
from stages.runtime.state import Draws, MicroBatch


def follows_a_plain_loop(phase: Phase) -> bool:
    """Whether forwards run micro-batch by micro-batch."""
    turns = [(item.micro_batch, item.region) for item in phase.instructions if item.operation == "forward"]
    return turns == sorted(turns)


def rehearse(
    graph: g.RegionGraph, batches: Sequence[MicroBatch], device: Device
) -> dict[tuple[int, int], Draws]:
    """The generator's states of each (micro-batch, region) that draws; leaves the generator as a
    plain loop over `batches` does. Takes no more memory at once than the forward of a region."""
    found = {}
    for number, batch in enumerate(batches):
        if batch.empty:
            continue
        for index, region in enumerate(graph.regions):
            if region.random:
                before = device.rng_state()
                for node in graph.nodes[region.start : region.end]:
                    if node.random:
                        _draw(node, batch.sizes, device.target)
                found[number, index] = Draws(before, device.rng_state())
    return found


@contextmanager
def drawing(draws: Draws | None, region: str, device: Device) -> Iterator[None]:
    """Gives a forward the random numbers of its turn in a plain loop, and leaves the generator alone.

    Args:
        draws: As rehearsed; None: the next numbers are those of its turn anyway.

    Raises:
        StageError: The forward drew otherwise than was rehearsed.
    """
    if draws is None:
        yield
        return
    now = device.rng_state()
    device.set_rng_state(draws.before)
    try:
        yield
        if not torch.equal(device.rng_state(), draws.after):
            raise StageError(
                f"region {region} drew other random numbers than its operators do on tensors of these sizes; "
                f"with micro-batches its masks would not be those of a plain loop. Use "
                f"solver.micro_batch_order=horizontal, or train.micro_batches=1",
                key="train.micro_batches",
            )
    finally:
        device.set_rng_state(now)


def _draw(node: g.Node, sizes: dict[str, int], device: torch.device) -> None:
    names = dict.fromkeys(node_references(node))
    stand_ins = {name: _stand_in(spec, sizes, device) for name, spec in zip(names, node.drawn, strict=True)}
    args = [decode(arg, stand_ins.__getitem__, sizes, device) for arg in node.args]
    kwargs = {key: decode(arg, stand_ins.__getitem__, sizes, device) for key, arg in node.kwargs.items()}
    with torch.no_grad():
        operators.resolve(node.op)(*args, **kwargs)


def _stand_in(spec: g.TensorSpec, sizes: dict[str, int], device: torch.device) -> torch.Tensor:
    shape = [g.evaluate_size(size, sizes) for size in spec.shape]
    stride = [g.evaluate_size(size, sizes) for size in spec.stride]
    flat = torch.zeros(g.storage_elements(spec, sizes), dtype=operators.dtype(spec.dtype), device=device)
    return flat.as_strided(shape, stride)
