"""What a batch must look like: the tensors that a plan takes, and everything else as it was traced.

A trace fixes every value that is not a tensor. So a later batch must have the same ones in the same
places, whether they are given by position, by keyword or by default; the order of keys is free.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError

Batch = Mapping[str, Any] | Sequence[Any]
Path = tuple[str | int, ...]


class BatchStructure:
    """The call of `model` that was planned.

    Args:
        batch: Keyword arguments as a mapping, or positional ones as a sequence.

    Raises:
        DataError: The batch does not fit the model's forward, or holds an array that is no tensor.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self._signature = inspect.signature(model.forward)
        args, kwargs = arguments(batch)
        leaves = dict(_leaves(self._bound(args, kwargs)))
        self._constants = {path: leaf for path, leaf in leaves.items() if not isinstance(leaf, torch.Tensor)}
        for path, constant in self._constants.items():
            if hasattr(constant, "__array__"):
                raise DataError(
                    f"the batch has a {type(constant).__name__} at {_text(path)}, which a plan would fix "
                    f"at this value; expected a tensor. Convert it with torch.as_tensor",
                    found=type(constant).__name__,
                    expected="torch.Tensor",
                )

    def tensors(self, batch: Batch, inputs: Sequence[g.InputSpec]) -> dict[str, torch.Tensor]:
        """The tensors of a later batch, by graph input.

        Args:
            inputs: Of the graph that was traced from the planned batch.

        Raises:
            DataError: A tensor is missing, one too many, or another value is not the traced one.
        """
        leaves = dict(_leaves(self._bound(*arguments(batch))))
        found = {}
        for spec in inputs:
            path = self._place(spec.path)
            tensor = leaves.pop(path, _NOTHING)
            if not isinstance(tensor, torch.Tensor):
                raise _unexpected(path, tensor, "a tensor")
            found[spec.name] = tensor
        for path, expected in self._constants.items():
            value = leaves.pop(path, _NOTHING)
            if not _equal(value, expected):
                raise _unexpected(path, value, _shown(expected))
        for path, value in leaves.items():
            raise _unexpected(path, value, "nothing")
        return found

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument of forward by name, defaults too."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            expected = ", ".join(self._signature.parameters)
            raise DataError(
                f"the batch does not fit the model's forward: {error}. It takes {expected}",
                found=str(error),
                expected=expected,
            ) from error
        bound.apply_defaults()
        return dict(bound.arguments)

    def _place(self, path: list[str | int]) -> Path:
        """Where in `_bound` the graph's ["args", 0, ...] or ["kwargs", "x", ...] is."""
        root, key, *rest = path
        kinds = inspect.Parameter
        parameters = self._signature.parameters
        if root == "args":
            assert isinstance(key, int), path
            positional = [
                name
                for name, parameter in parameters.items()
                if parameter.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
            ]
            if key < len(positional):
                return (positional[key], *rest)
            variadic = next(name for name, one in parameters.items() if one.kind is kinds.VAR_POSITIONAL)
            return (variadic, key - len(positional), *rest)
        if key in parameters and parameters[str(key)].kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL):
            return (key, *rest)
        variadic = next(name for name, one in parameters.items() if one.kind is kinds.VAR_KEYWORD)
        return (variadic, key, *rest)


def arguments(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the call that a batch stands for.

    Raises:
        DataError: It is neither a mapping nor a sequence.
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return tuple(batch), {}
    raise DataError(
        f"the batch is a {type(batch).__name__}; expected keyword arguments as a mapping, or positional "
        f"ones as a list or tuple",
        found=type(batch).__name__,
        expected="mapping, list or tuple",
    )


class _Nothing:
    """Stands where a batch has no value at all."""


_NOTHING = _Nothing()


def _leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Everything in nested mappings, lists, tuples and dataclasses that is none of these."""
    children: Iterator[tuple[Any, Any]]
    if isinstance(value, Mapping):
        children = iter(value.items())
    elif isinstance(value, list | tuple):
        children = iter(enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    else:
        yield path, value
        return
    for key, item in children:
        yield from _leaves(item, (*path, key))


def _equal(value: Any, expected: Any) -> bool:
    """Equal in type too: 2 and 2.0 promote dtypes differently."""
    if value is expected:
        return True
    if type(value) is not type(expected):
        return False
    if isinstance(value, float) and math.isnan(value):
        return math.isnan(expected)
    return bool(value == expected)


def _unexpected(path: Path, found: Any, expected: str) -> DataError:
    shown = _shown(found)
    return DataError(
        f"the batch has {shown} at {_text(path)}; the planned one had {expected} there. A plan fixes all "
        f"but the values of tensors: give batches of one structure, or plan again",
        key=_text(path),
        found=shown,
        expected=expected,
    )


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "nothing"
    return "a tensor" if isinstance(value, torch.Tensor) else f"{value!r:.80}"


def _text(path: Path) -> str:
    return ".".join(str(part) for part in path)
