"""Structured inputs and outputs as flat tensors, each found by its path."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from stages.trace import python_state

Path = list[str | int]


def tensors_in(value: Any, path: Path | None = None) -> Iterator[tuple[Path, torch.Tensor]]:
    """Every tensor in nested dicts, lists, tuples and dataclasses, with the path to it."""
    path = path or []
    if isinstance(value, torch.Tensor):
        yield path, value
    for key, item in _children(value):
        yield from tensors_in(item, [*path, key])


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)


def replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """`value` with its tensors replaced by the next ones of `tensors`, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return type(value)((key, replaced(item, tensors)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(replaced(item, tensors) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(replaced(item, tensors) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {name: replaced(item, tensors) for name, item in _children(value)}
        return dataclasses.replace(value, **items)  # type: ignore[arg-type]
    return value


class Found:
    """What forward returned; an object of its own, since export resets a module's attributes."""

    def __init__(self) -> None:
        self.output_paths: list[Path] = []
        self.output: Any = None
        self.loss: int | None = None


class Flat(nn.Module):
    """`module` as a function from flat tensors to flat tensors; everything else is fixed.

    Args:
        batch: (args, kwargs) with tensors where a batch has them.
        only_loss: Return the loss alone, so that nothing keeps other outputs alive.
    """

    def __init__(
        self, module: nn.Module, batch: tuple[tuple[Any, ...], dict[str, Any]], only_loss: bool
    ) -> None:
        super().__init__()
        self.module = module
        self._batch = batch
        self._only_loss = only_loss
        self.found = Found()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = replaced(self._batch, iter(tensors))
        with python_state.refused(self.module):
            output = self.module(*args, **kwargs)
        found = list(tensors_in(output))
        _warn_of_lost(output)
        loss = find_loss(found)
        if self._only_loss and loss is not None:
            found, loss = [found[loss]], 0
        self.found.loss = loss
        self.found.output = output
        self.found.output_paths = [path for path, _ in found]
        return tuple(tensor for _, tensor in found)


def find_loss(outputs: list[tuple[Path, torch.Tensor]]) -> int | None:
    """Which output is the loss: the one called "loss", the only one, or the first scalar."""
    scalars = [index for index, (_, tensor) in enumerate(outputs) if tensor.dim() == 0]
    named = [index for index in scalars if outputs[index][0] == ["loss"]]
    return next(iter([*named, *scalars]), None)


def template_of(output: Any) -> Any:
    """`output` with an empty tensor in place of each of its tensors, None in place of unknown objects."""
    tensors = (torch.empty(0) for _ in tensors_in(output))
    return _without_unknown(replaced(output, tensors))


def _without_unknown(value: Any) -> Any:
    """Recursively: what `replaced` cannot look into may hold tensors of the trace."""
    if value is None or isinstance(value, (torch.Tensor, bool, int, float, str, complex, bytes)):
        return value
    if isinstance(value, dict):
        return type(value)((key, _without_unknown(item)) for key, item in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_without_unknown(item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_without_unknown(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{str(name): _without_unknown(item) for name, item in _children(value)}
        )
    return None


def _warn_of_lost(value: Any) -> None:
    """Objects of other types may hold tensors that a plan cannot return."""
    for _, item in _children(value):
        known = item is None or isinstance(item, (torch.Tensor, bool, int, float, str))
        if not known and not any(True for _ in _children(item)) and hasattr(item, "__dict__"):
            warnings.warn(
                f"the model's output holds a {type(item).__name__}, which is not returned", stacklevel=3
            )
        elif not known:
            _warn_of_lost(item)
