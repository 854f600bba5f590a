"""The exported graph as our own nodes: sizes folded in, assertions gone, nested graphs inlined."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError, TraceError
from stages.region import operators
from stages.trace import arguments, checkpoints, effects
from stages.trace.capture import Captured
from stages.trace.places import stack_place
from stages.trace.sizes import UnsupportedSizeError, tensor_spec, to_size

#: only assert or constrain; what they say is checked when a batch comes in
_DROPPED = (
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size",
)  # fmt: skip


@dataclass(frozen=True)
class Traced:
    """A node with what only the trace needs.

    `stack` is the module path at each level, outermost first, with the number of the call.
    `writes` names the tensors that the node changes in place.
    """

    node: g.Node
    stack: tuple[tuple[str, int], ...]
    specs: tuple[g.TensorSpec, ...]
    writes: tuple[str, ...] = ()


@dataclass
class Converted:
    """`tensors` maps the name of each parameter, buffer and constant read to the traced tensor."""

    nodes: list[Traced] = field(default_factory=list)
    inputs: list[tuple[str, g.TensorSpec]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)


class UnsupportedSizesError(Exception):
    """Dimensions (by name) that must become static, because a size cannot be expressed."""

    def __init__(self, names: set[str], expression: str) -> None:
        super().__init__(expression)
        self.names = names


@dataclass(frozen=True)
class _Modes:
    no_grad: bool = False
    autocast: g.Autocast | None = None


def convert(captured: Captured, names: dict[str, str]) -> Converted:
    """All nodes in order.

    Args:
        names: Canonical name of each parameter and buffer, by any of its names.

    Raises:
        UnsupportedSizesError: A size is not in the grammar; trace again with these dimensions static.
        TraceError: A node is not an allowed operator.
    """
    return _Converter(captured, names).run()


class _Converter:
    def __init__(self, captured: Captured, names: dict[str, str]) -> None:
        self._captured = captured
        self._canonical = names
        self._symbols = captured.resolved.names
        self._used: set[str] = set(names.values())
        self._result = Converted()

    def run(self) -> Converted:
        program = self._captured.program
        environment: dict[Any, Any] = {}
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                environment[node] = self._placeholder(node, specs[node.name])
        outputs = self._graph(program.graph_module, environment, _Modes())
        self._result.outputs = [self._output(item) for item in outputs]
        return self._result

    def _output(self, item: Any) -> str:
        if not isinstance(item, g.Ref):
            raise TraceError(f"the model returns {item!r}, which no operator made; expected tensors")
        return item.name

    def _placeholder(self, node: FxNode, spec: Any) -> g.Ref:
        value = node.meta["val"]
        if spec.kind == InputKind.USER_INPUT:
            name = self._unique(self._captured.input_names[len(self._result.inputs)])
            self._result.inputs.append((name, self._spec(value, node)))
            return g.Ref(name)
        target = spec.target.removeprefix("module.")
        if spec.kind == InputKind.CONSTANT_TENSOR and target not in self._canonical:
            value = self._captured.program.constants[spec.target]
            name = self._unique(target)
            self._canonical[target] = name
            self._result.constants.add(name)
        elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise TraceError(f"the model takes {spec.kind.name.lower()} {target!r}; expected tensors only")
        name = self._canonical[target]
        if not isinstance(value, torch.Tensor):
            raise TraceError(f"constant {target!r} is a {type(value).__name__}; expected a tensor")
        self._result.tensors[name] = value
        return g.Ref(name)

    def _graph(self, module: GraphModule, environment: dict[Any, Any], modes: _Modes) -> list[Any]:
        """Converts one (nested) graph; its outputs as references."""
        for node in module.graph.nodes:
            if node.op == "output":
                return [self._encode(item, environment, node) for item in _flat(node.args[0])]
            if node.op == "get_attr":
                environment[node] = getattr(module, str(node.target))
            elif node.op == "call_function":
                self._call(node, environment, modes)
        raise TraceError("the traced graph has no output")

    def _call(self, node: FxNode, environment: dict[Any, Any], modes: _Modes) -> None:
        name = str(node.target)
        if name == "wrap_with_set_grad_enabled":
            enabled, inner, *operands = node.args
            environment[node] = self._inline(
                inner, operands, environment, replace(modes, no_grad=not enabled)
            )
        elif name == "wrap_with_autocast":
            _, dtype, enabled, _, inner, *operands = node.args
            autocast = g.Autocast(bool(enabled), _dtype_name(dtype))
            environment[node] = self._inline(inner, operands, environment, replace(modes, autocast=autocast))
        elif _is_size(node):
            pass
        elif node.target is operator.getitem and isinstance(environment.get(node.args[0]), list):
            environment[node] = environment[node.args[0]][node.args[1]]
        elif (
            isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.name.split("::")[1] in _DROPPED
        ):
            pass
        else:
            environment[node] = self._operator(node, environment, modes)

    def _inline(self, inner: Any, operands: Any, environment: dict[Any, Any], modes: _Modes) -> list[Any]:
        module = environment[inner]
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        inside = {
            placeholder: environment.get(operand, operand)
            for placeholder, operand in zip(placeholders, operands, strict=True)
        }
        return self._graph(module, inside, modes)

    def _operator(self, node: FxNode, environment: dict[Any, Any], modes: _Modes) -> g.Ref:
        place = stack_place(node.meta.get("stack_trace"))
        stack = _stack(node)
        module = stack[-1][0] if stack else ""
        try:
            op = operators.operator_name(node.target)
            args = [self._encode(arg, environment, node) for arg in node.args]
            kwargs = {key: self._encode(arg, environment, node) for key, arg in node.kwargs.items()}
        except (ArtifactError, arguments.UnknownArgumentError) as error:
            raise TraceError(
                f"{place or 'the model'}: module {module!r} uses {node.target}, which cannot be "
                f"planned: {error}",
                found=str(node.target),
                expected="an ATen operator",
            ) from error
        if effects.sends_sparse_gradient(op, args, kwargs):
            raise TraceError(
                f"{place or 'the model'}: module {module!r} asks for a sparse gradient ({op}); expected "
                f"a dense one, which optimizer and tiers work on. Set sparse=False",
                found="sparse=True",
                expected="sparse=False",
            )
        random = effects.is_random(op, args, kwargs)
        if random and checkpoints.redraws(node.meta):
            raise TraceError(
                f"{place or 'the model'}: module {module!r} draws random numbers ({op}) inside a checkpoint "
                f"block with preserve_rng_state=False, so that its backward would belong to other numbers "
                f"than its forward. Expected the same ones: leave preserve_rng_state out",
                found="preserve_rng_state=False",
                expected="preserve_rng_state=True",
            )
        specs = tuple(
            self._spec(item, node) for item in _flat(node.meta.get("val")) if isinstance(item, torch.Tensor)
        )
        record = g.Node(
            name=self._unique(node.name), op=op, args=args, kwargs=kwargs, no_grad=modes.no_grad,
            autocast=modes.autocast, random=random, module=module,
            location=place, checkpoint=checkpoints.marks(node.meta),
        )  # fmt: skip
        writes, returned = effects.written(op, args, kwargs)
        self._result.nodes.append(Traced(record, stack, specs, writes))
        # an in-place operator gives back the very tensor it changed: later readers read that one
        return g.Ref(returned or record.name)

    def _encode(self, value: Any, environment: dict[Any, Any], node: FxNode) -> g.Arg:
        def other(item: Any) -> g.Arg | None:
            if isinstance(item, FxNode):
                if _is_size(item):
                    return self._size(item.meta["val"], node)
                return environment[item]
            if isinstance(item, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return self._size(item, node)
            if isinstance(item, g.Ref):
                return item
            return None

        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._size(value, node)
        return arguments.encode(value, other)

    def _size(self, value: Any, node: FxNode) -> g.Arg:
        if isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, torch.SymInt):
            size = self._checked(value, node)
            return size if isinstance(size, int) else g.SizeArg(size)
        expression = value.node.expr
        if expression.is_number or expression in (sympy.true, sympy.false):
            return bool(expression) if isinstance(value, torch.SymBool) else float(expression)
        raise self._static(expression, node)

    def _checked(self, value: Any, node: FxNode) -> g.Size:
        try:
            return to_size(value, self._symbols)
        except UnsupportedSizeError as error:
            raise self._static(value.node.expr, node) from error

    def _spec(self, tensor: torch.Tensor, node: FxNode) -> g.TensorSpec:
        try:
            return tensor_spec(tensor, self._symbols)
        except UnsupportedSizeError as error:
            raise self._static(error, node) from error

    def _static(self, cause: Any, node: FxNode) -> Exception:
        symbols = getattr(cause, "symbols", None) or getattr(cause, "free_symbols", frozenset())
        names = {self._symbols[symbol] for symbol in symbols if symbol in self._symbols}
        if names:
            return UnsupportedSizesError(names, str(cause))
        stack = _stack(node)
        return TraceError(
            f"{stack_place(node.meta.get('stack_trace')) or 'the model'}: module "
            f"{stack[-1][0] if stack else ''!r} makes a tensor whose size ({cause}) depends on data; "
            f"expected sizes that follow from the batch's shapes"
        )

    def _unique(self, name: str) -> str:
        candidate, number = name, 0
        while candidate in self._used:
            number += 1
            candidate = f"{name}_{number}"
        self._used.add(candidate)
        return candidate


def _is_size(node: FxNode) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, bool, int, float))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif value is not None:
        yield value


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _stack(node: FxNode) -> tuple[tuple[str, int], ...]:
    """Paths of the modules around a node, without the wrapper's own two levels."""
    levels = []
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        _, _, call = str(key).partition("@")
        if path.startswith("module."):
            levels.append((path.removeprefix("module."), int(call) if call.isdigit() else 0))
    return tuple(levels)
