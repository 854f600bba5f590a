"""Which dimensions of a batch may vary, and what a trace found out about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from stages.artifacts import graph as g

#: as large as a dimension without an upper bound may be
UNBOUNDED = 2**31 - 1

#: an example of size 0 or 1 specialises silently, so that no example has it
LEAST_EXAMPLE = 2

BATCH, SEQUENCE = "batch", "seq"


@dataclass(frozen=True)
class Dimensions:
    """Names of the dimensions of each flat input (None: static), and the planned size of each name."""

    names: tuple[tuple[str | None, ...], ...]
    planned: dict[str, int]

    def without(self, static: set[str]) -> Dimensions:
        """The same with the dimensions `static` fixed at their planned sizes."""
        names = tuple(tuple(None if name in static else name for name in dims) for dims in self.names)
        return Dimensions(names, {name: size for name, size in self.planned.items() if name not in static})

    def example(self, index: int, shape: Sequence[int]) -> list[int]:
        """The shape with which input `index` is traced."""
        named = zip(shape, self.names[index], strict=True)
        return [size if name is None else max(size, LEAST_EXAMPLE) for size, name in named]


def dimensions_of(tensors: Sequence[torch.Tensor], dynamic: bool) -> Dimensions:
    """The first dimension is the batch's; with token-like (integer) inputs, the second is the sequence's.

    A tensor whose size differs from that of the first such tensor keeps the dimension static.
    """
    names: list[list[str | None]] = [[None] * tensor.dim() for tensor in tensors]
    planned: dict[str, int] = {}
    if dynamic:
        for tensor, dims in zip(tensors, names, strict=True):
            if tensor.dim() and planned.setdefault(BATCH, tensor.shape[0]) == tensor.shape[0]:
                dims[0] = BATCH
        length = next((tensor.shape[1] for tensor in tensors if _is_token_like(tensor)), None)
        for tensor, dims in zip(tensors, names, strict=True):
            if length is not None and tensor.dim() >= 2 and tensor.shape[1] == length:
                planned[SEQUENCE] = length
                dims[1] = SEQUENCE
    return Dimensions(tuple(map(tuple, names)), planned)


def _is_token_like(tensor: torch.Tensor) -> bool:
    return tensor.dim() >= 2 and not tensor.is_floating_point() and not tensor.is_complex()


@dataclass
class Resolved:
    """What a trace says of the dimensions.

    `names` maps each of its symbols to a dimension's name; `conflicts` are dimensions that must be
    static, because the model fixes them or depends on them in a way that bounds cannot express.
    """

    names: dict[sympy.Symbol, str] = field(default_factory=dict)
    symbols: dict[str, g.Symbol] = field(default_factory=dict)
    conflicts: set[str] = field(default_factory=set)


def resolve(dimensions: Dimensions, shapes: Sequence[torch.Size], environment: ShapeEnv) -> Resolved:
    """Reads the dimensions' names and bounds from the traced inputs' shapes and the guards."""
    result = Resolved()
    for dims, shape in zip(dimensions.names, shapes, strict=True):
        for name, size in zip(dims, shape, strict=True):
            if name is not None:
                _name_symbol(name, size, result)
    _apply_guards(result, environment, dimensions.planned)
    for symbol, name in result.names.items():
        _bound(name, environment.var_to_range[symbol], result, dimensions.planned[name])
    for name, symbol in result.symbols.items():
        if not symbol.minimum <= symbol.planned <= symbol.maximum:
            result.conflicts.add(name)
    return result


def _name_symbol(name: str, size: int | torch.SymInt, result: Resolved) -> None:
    expression = size.node.expr if isinstance(size, torch.SymInt) else None
    if not isinstance(expression, sympy.Symbol):
        result.conflicts.add(name)  # the model fixed it
    elif result.names.setdefault(expression, name) != name:
        result.conflicts |= {name, result.names[expression]}  # the model wants two of them equal


def _bound(name: str, interval: ValueRanges[sympy.Expr], result: Resolved, planned: int) -> None:
    """Intersects the interval of one symbol into the bounds of its dimension.

    The tracer never considers sizes under 2. A batch of one runs on the same operators; a sequence
    of one takes other branches in libraries.
    """
    minimum = (
        1 if interval.lower <= LEAST_EXAMPLE and (name == BATCH or planned == 1) else int(interval.lower)
    )
    unbounded = interval.upper in (int_oo, sympy.oo)
    _narrow(result, name, minimum, UNBOUNDED if unbounded else int(interval.upper), planned)


def _narrow(result: Resolved, name: str, minimum: int, maximum: int, planned: int) -> None:
    known = result.symbols.get(name, g.Symbol(1, UNBOUNDED, planned))
    result.symbols[name] = g.Symbol(max(minimum, known.minimum), min(maximum, known.maximum), planned)


def _apply_guards(result: Resolved, environment: ShapeEnv, planned: dict[str, int]) -> None:
    """Conditions that the trace relied on: as bounds where they are, else their dimensions are fixed."""
    canonical = {name: symbol for symbol, name in reversed(result.names.items())}
    same: dict[sympy.Symbol, sympy.Expr] = {
        # what is already known to be fixed holds at its planned size
        symbol: sympy.Integer(planned[name]) if name in result.conflicts else canonical[name]
        for symbol, name in result.names.items()
    }
    for guard in environment.guards:
        condition = environment.simplify(guard.expr).xreplace(same)
        free = [symbol for symbol in condition.free_symbols if symbol in result.names]
        if not free or environment._maybe_evaluate_static(condition) == sympy.true:
            continue
        name = result.names[free[0]]
        bounds = _bounds(condition, free[0], planned[name]) if len(free) == 1 else None
        if bounds is None:
            result.conflicts |= {result.names[symbol] for symbol in free}
        else:
            _narrow(result, name, *bounds, planned[name])


def _bounds(condition: sympy.Expr, symbol: sympy.Symbol, planned: int) -> tuple[int, int] | None:
    """The largest interval around `planned` in which a condition linear in one symbol holds."""
    if not isinstance(condition, sympy.core.relational.Relational) or isinstance(condition, sympy.Eq):
        return None
    left: Any = condition.lhs
    difference = sympy.expand(left - condition.rhs)
    slope = difference.coeff(symbol, 1)
    offset = difference - slope * symbol
    if not slope.is_Integer or not offset.is_Integer or slope == 0:
        return None
    border = sympy.Rational(-offset, slope)  # where both sides are equal
    below, above = (1, int(sympy.ceiling(border)) - 1), (int(sympy.floor(border)) + 1, UNBOUNDED)
    if isinstance(condition, sympy.Ne):
        return above if planned > border else below
    if condition.func not in (sympy.Lt, sympy.Gt):  # the border itself is allowed
        below, above = (1, int(sympy.floor(border))), (int(sympy.ceiling(border)), UNBOUNDED)
    grows = condition.func in (sympy.Gt, sympy.Ge)
    return above if grows == (slope > 0) else below
