"""Symbolic sizes in the graph's own small grammar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Max, Min, Mod, PythonMod

from stages.artifacts import graph as g


class UnsupportedSizeError(Exception):
    """A size that the grammar cannot express. `symbols` are the dimensions that must become static."""

    def __init__(self, expression: sympy.Basic) -> None:
        super().__init__(str(expression))
        self.symbols = frozenset(expression.free_symbols)


def to_size(value: object, names: Mapping[sympy.Symbol, str]) -> g.Size:
    """An int or SymInt as a `Size`.

    Raises:
        UnsupportedSizeError: It involves an operation other than the grammar's, or a size that
            depends on data.
    """
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        return _convert(value.node.expr, names)
    raise TypeError(f"found a {type(value).__name__}; expected a size")


def _convert(expression: sympy.Basic, names: Mapping[sympy.Symbol, str]) -> g.Size:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        if expression not in names:
            raise UnsupportedSizeError(expression)
        return names[expression]
    if isinstance(expression, sympy.Add):
        return _sum(expression.args, names)
    if isinstance(expression, sympy.Mul):
        return _fold("mul", expression.args, names)
    if isinstance(expression, sympy.Pow) and expression.exp.is_Integer and 1 < int(expression.exp) <= 8:
        return _fold("mul", [expression.base] * int(expression.exp), names)
    operator = _operator(expression)
    if operator is None:
        raise UnsupportedSizeError(expression)
    return _fold(operator, expression.args, names)


def _operator(expression: sympy.Basic) -> str | None:
    if isinstance(expression, (FloorDiv, CleanDiv)):
        return "floordiv"
    if isinstance(expression, (Mod, PythonMod)):
        return "mod"
    if isinstance(expression, (Max, sympy.Max)):
        return "max"
    if isinstance(expression, (Min, sympy.Min)):
        return "min"
    return None


def _sum(terms: Iterable[Any], names: Mapping[sympy.Symbol, str]) -> g.Size:
    """Terms with a negative factor are subtracted, so that no product is negative."""
    ordered = sorted(terms, key=lambda term: (bool(term.could_extract_minus_sign()), str(term)))
    total = _convert(ordered[0], names)
    for term in ordered[1:]:
        if term.could_extract_minus_sign():
            total = g.Expr("sub", total, _convert(-term, names))
        else:
            total = g.Expr("add", total, _convert(term, names))
    return total


def _fold(operator: str, terms: Iterable[sympy.Basic], names: Mapping[sympy.Symbol, str]) -> g.Size:
    return reduce(
        lambda left, right: g.Expr(operator, left, right), (_convert(term, names) for term in terms)
    )


def tensor_spec(tensor: torch.Tensor, names: Mapping[sympy.Symbol, str]) -> g.TensorSpec:
    """Shape, strides and dtype of a (fake) tensor."""
    return g.TensorSpec(
        shape=[to_size(size, names) for size in tensor.shape],
        stride=[to_size(step, names) for step in tensor.stride()],
        dtype=str(tensor.dtype).removeprefix("torch."),
    )
