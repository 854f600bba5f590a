"""A region as a callable: its nodes, run one after another on tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch

from stages.artifacts import graph as g
from stages.region import operators


@dataclass(frozen=True)
class _Step:
    """One node, resolved: what to call and which names die after it."""

    node: g.Node
    call: Callable[..., object]
    last_reads: tuple[str, ...]


class RegionFunction:
    """Runs one region of `graph` on tensors, each operator exactly as the model called it.

    Args:
        graph: The traced model.
        region: The region to run.
        device: Where tensors that operators create are made.
        stand_ins: Operator name -> what is called in its place: another device's kernel of it.

    Raises:
        ArtifactError: A node names an operator that is not allowed.
    """

    def __init__(
        self,
        graph: g.RegionGraph,
        region: g.Region,
        device: torch.device,
        stand_ins: Mapping[str, Callable[..., object]] | None = None,
    ) -> None:
        self.region = region
        self._device = device
        nodes = graph.nodes[region.start : region.end]
        self._steps = _resolve(nodes, frozenset(region.outputs), stand_ins or {})

    def __call__(self, tensors: Mapping[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, torch.Tensor]:
        """The region's outputs by value name.

        Args:
            tensors: Inputs, weights and buffers by name. Buffers are updated in place.
            sizes: The value of each size symbol.
        """
        environment: dict[str, object] = {}

        def lookup(name: str) -> object:
            return environment[name] if name in environment else tensors[name]

        for context, steps in groupby(self._steps, key=lambda step: (step.node.no_grad, step.node.autocast)):
            with _traced_modes(*context, self._device):
                for step in steps:
                    self._run(step, environment, lookup, sizes)
        return {name: _tensor(environment[name], name) for name in self.region.outputs}

    def _run(
        self,
        step: _Step,
        environment: dict[str, object],
        lookup: Callable[[str], object],
        sizes: dict[str, int],
    ) -> None:
        node = step.node
        args = [decode(arg, lookup, sizes, self._device) for arg in node.args]
        kwargs = {key: decode(arg, lookup, sizes, self._device) for key, arg in node.kwargs.items()}
        environment[node.name] = step.call(*args, **kwargs)
        for name in step.last_reads:
            # eager drops its locals as it goes; keeping them would raise the region's peak
            environment.pop(name, None)


def decode(
    arg: g.Arg | list[g.Scalar], lookup: Callable[[str], object], sizes: dict[str, int], device: torch.device
) -> object:
    """The Python value of an argument. `lookup` finds what a `Ref` names."""
    match arg:
        case g.Ref(name):
            return lookup(name)
        case list():
            return [decode(item, lookup, sizes, device) for item in arg]
        case g.SizeArg(size):
            return g.evaluate_size(size, sizes)
        case g.Dtype(name):
            return operators.dtype(name)
        case g.Layout(name):
            return operators.layout(name)
        case g.MemoryFormat(name):
            return operators.memory_format(name)
        case g.Device(name):
            return device if name == "target" else torch.device("cpu")
        case g.Special(name):
            return float(name)
        case _:
            return arg


def references(arg: g.Arg | list[g.Scalar]) -> Iterator[str]:
    """The names that an argument reads."""
    if isinstance(arg, g.Ref):
        yield arg.name
    elif isinstance(arg, list):
        for item in arg:
            yield from references(item)


def node_references(node: g.Node) -> Iterator[str]:
    """The names that a node reads, once per use."""
    for arg in node.args:
        yield from references(arg)
    for arg in node.kwargs.values():
        yield from references(arg)


def _resolve(
    nodes: list[g.Node], outputs: frozenset[str], stand_ins: Mapping[str, Callable[..., object]]
) -> list[_Step]:
    """Nodes with their callables, and with the names whose last read each one is."""
    steps: list[_Step] = []
    still_read = set(outputs)
    for node in reversed(nodes):
        dying = set(node_references(node)) - still_read
        if node.name not in still_read:
            dying.add(node.name)
        still_read |= dying
        call = operator.getitem if node.op == "getitem" else operators.resolve(node.op)
        call = stand_ins.get(node.op, call)
        steps.append(_Step(node, call, tuple(dying - outputs)))
    return steps[::-1]


@contextmanager
def _traced_modes(no_grad: bool, autocast: g.Autocast | None, device: torch.device) -> Iterator[None]:
    """The gradient and autocast state in which nodes were traced."""
    with ExitStack() as stack:
        if no_grad:
            stack.enter_context(torch.no_grad())
        if autocast is not None:
            stack.enter_context(_autocast(autocast, device))
        yield


def _autocast(autocast: g.Autocast, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=operators.dtype(autocast.dtype), enabled=autocast.enabled)


def _tensor(value: object, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"region output {name} is a {type(value).__name__}; expected a tensor")
    return value
