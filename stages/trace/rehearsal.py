"""Runs the nodes once on tensors without memory, as the runtime will, at the planned sizes.

What the planner must know of gradients and of shared storage is read off instead of being guessed:
which values require a gradient, which tensors share storage, and which weights the gradient of the
loss reaches at which node. It also proves that the written nodes run.
"""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch._C._autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch._subclasses.fake_tensor import FakeTensorMode

from stages.artifacts import graph as g
from stages.artifacts.errors import StageError, TraceError
from stages.region import operators, shapes
from stages.region.interpreter import decode
from stages.trace.nodes import Traced

_CPU = torch.device("cpu")


@dataclass
class Facts:
    """What a run of the nodes shows.

    Attributes:
        storage: Number of the storage of each tensor, by name (parameters and inputs too).
        requires_grad: Names of tensors that require a gradient.
        receives: (node index, parameter name): the node sends a gradient to the parameter.
    """

    storage: dict[str, int] = field(default_factory=dict)
    requires_grad: set[str] = field(default_factory=set)
    receives: set[tuple[int, str]] = field(default_factory=set)


def rehearse(
    nodes: list[Traced],
    parameters: list[g.Parameter],
    inputs: list[tuple[str, g.TensorSpec]],
    sizes: dict[str, int],
    loss: str | None,
) -> Facts:
    """Runs `nodes`; `sizes` are the planned ones.

    Raises:
        TraceError: A node fails, or gives a tensor of another shape than was traced.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), shapes.as_computed():
        run = _Run(sizes)
        for parameter in parameters:
            run.enter(parameter.name, parameter.spec, parameter.requires_grad)
        for name, spec in inputs:
            run.enter(name, spec, False)
        for traced in nodes:
            run.node(traced)
        run.follow_gradients(loss)
    return run.facts


class _Run:
    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes
        self._tensors: dict[str, object] = {}
        self._storages: dict[int, int] = {}
        self._weights: list[str] = []
        self._starts: list[int] = []  # autograd's sequence number before each node
        self.facts = Facts()

    def enter(self, name: str, spec: g.TensorSpec, requires_grad: bool) -> None:
        shape = [g.evaluate_size(size, self._sizes) for size in spec.shape]
        stride = [g.evaluate_size(step, self._sizes) for step in spec.stride]
        tensor = torch.empty_strided(shape, stride, dtype=operators.dtype(spec.dtype))
        self._enter(name, tensor.requires_grad_(requires_grad))
        if requires_grad:
            self._weights.append(name)

    def _enter(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name] = tensor
        key = tensor.untyped_storage()._cdata
        self.facts.storage[name] = self._storages.setdefault(key, len(self._storages))
        if tensor.requires_grad:
            self.facts.requires_grad.add(name)

    def node(self, traced: Traced) -> None:
        node = traced.node
        self._starts.append(_get_sequence_nr())
        try:
            result = self._call(node)
        except StageError:
            raise
        except Exception as error:  # a boundary: any operator may raise anything
            raise TraceError(
                f"{node.location}: module {node.module!r}: {node.op} does not run at the planned sizes "
                f"{self._sizes}: {type(error).__name__}: {error}"
            ) from error
        self._tensors[node.name] = result
        found = [result] if isinstance(result, torch.Tensor) else list(_tensors(result))
        if isinstance(result, torch.Tensor):
            self._enter(node.name, result)
            for name in traced.writes:  # in-place operators make their target require a gradient
                target = self._tensors[name]
                if isinstance(target, torch.Tensor) and target.requires_grad:
                    self.facts.requires_grad.add(name)
        elif found:
            self.facts.storage[node.name] = -1
        for tensor, spec in zip(found, traced.specs, strict=True):
            self._check(node, tensor, spec)

    def _call(self, node: g.Node) -> object:
        args = [decode(arg, self._tensors.__getitem__, self._sizes, _CPU) for arg in node.args]
        kwargs = {
            key: decode(arg, self._tensors.__getitem__, self._sizes, _CPU) for key, arg in node.kwargs.items()
        }
        with ExitStack() as stack:
            if node.no_grad:
                stack.enter_context(torch.no_grad())
            if node.autocast is not None:
                dtype = operators.dtype(node.autocast.dtype)
                stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=node.autocast.enabled))
            return operators.resolve(node.op)(*args, **kwargs)

    def _check(self, node: g.Node, tensor: torch.Tensor, spec: g.TensorSpec) -> None:
        expected = [g.evaluate_size(size, self._sizes) for size in spec.shape]
        if list(tensor.shape) != expected or operators.DTYPE_NAMES.get(tensor.dtype) != spec.dtype:
            raise TraceError(
                f"{node.location}: module {node.module!r}: {node.op} gave {tensor.dtype} "
                f"{list(tensor.shape)} at the planned sizes {self._sizes}; "
                f"the trace says {spec.dtype} {expected}"
            )

    def follow_gradients(self, loss: str | None) -> None:
        """Walks autograd's graph from the loss: which node each gradient of a weight comes from."""
        root = self._tensors.get(loss or "")
        if not isinstance(root, torch.Tensor) or root.grad_fn is None:
            return
        # a node may give a weight itself back (a cast to its own dtype): the weight's name counts
        leaves = {id(self._tensors[name]): name for name in self._weights}
        pending, seen = [root.grad_fn], {root.grad_fn}
        while pending:
            function = pending.pop()
            index = bisect_right(self._starts, function._sequence_nr()) - 1
            for following, _ in function.next_functions:
                if following is None:
                    continue
                leaf = leaves.get(id(getattr(following, "variable", None)))
                if leaf is not None:
                    self.facts.receives.add((index, leaf))
                elif following not in seen:
                    seen.add(following)
                    pending.append(following)


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, (list, tuple)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []
