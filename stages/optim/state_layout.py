"""What an optimizer instance keeps of one parameter, into and out of flat tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stages.artifacts.errors import ConfigError

#: numbers that are no tensors, by the dtype that holds each exactly
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}


@dataclass(frozen=True)
class StateEntry:
    """One entry of `optimizer.state[parameter]`.

    kind: "tensor", "number" (a Python number, kept as a tensor of one element), "none", or "count"
    (the number of updates, as a tensor or number: made anew each time and not kept).
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    number: type = float

    @property
    def stored(self) -> bool:
        return self.kind in ("tensor", "number")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def layout_of(
    instance: torch.optim.Optimizer, parameter: torch.nn.Parameter, *, counts: bool
) -> list[StateEntry]:
    """The entries that a step left, in the class's order.

    Args:
        counts: Whether an entry named "step" is the number of updates.

    Raises:
        ConfigError: An entry is neither tensor nor number, or a tensor with gaps.
    """
    state = instance.state.get(parameter, {})
    return [_entry(instance, name, value, counts=counts) for name, value in state.items()]


def _entry(instance: torch.optim.Optimizer, name: object, value: object, *, counts: bool) -> StateEntry:
    if isinstance(name, str):
        is_count = counts and name == "step"
        if isinstance(value, torch.Tensor) and value.layout == torch.strided and _is_dense(value):
            kind = "count" if is_count else "tensor"
            shape, stride = tuple(value.shape), tuple(value.stride())
            return StateEntry(name, kind, shape, stride, value.dtype, torch.Tensor)
        if type(value) in _NUMBERS:
            return StateEntry(
                name, "count" if is_count else "number", dtype=_NUMBERS[type(value)], number=type(value)
            )
        if value is None:
            return StateEntry(name, "none")
    raise ConfigError(
        f"{type(instance).__name__} keeps state[{name!r}] of type {type(value).__name__}; expected a "
        f"dense tensor or a number, which is what can be moved between tiers. Use another optimizer",
        key="optimizer.name",
        found=type(value).__name__,
        expected="a dense tensor or a number",
    )


def load(
    instance: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    entries: list[StateEntry],
    states: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    """Gives a fresh instance the state that update `step` starts from. Tensors are not copied."""
    state: dict[str, object] = {}
    for entry in entries:
        if entry.kind == "tensor":
            flat = states[entry.name]
            state[entry.name] = flat.as_strided(entry.shape, entry.stride, flat.storage_offset())
        elif entry.kind == "number":
            state[entry.name] = entry.number(states[entry.name].item())
        elif entry.kind == "count":
            count = step - 1
            is_tensor = entry.number is torch.Tensor
            state[entry.name] = torch.tensor(count, dtype=entry.dtype) if is_tensor else entry.number(count)
        else:
            state[entry.name] = None
    instance.state[parameter] = state


def store(
    instance: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    entries: list[StateEntry],
    states: Mapping[str, torch.Tensor],
    step: int,
) -> None:
    """Takes the state that update `step` has left into our tensors.

    Raises:
        ConfigError: It is not what the class kept when it was probed.
    """
    found = layout_of(instance, parameter, counts=any(entry.kind == "count" for entry in entries))
    if found != entries:
        raise ConfigError(
            f"{type(instance).__name__} changed the state that it keeps of a parameter in update {step}: "
            f"{[entry.name for entry in found]} instead of {[entry.name for entry in entries]}, or their "
            f"shapes. Use another optimizer",
            key="optimizer.name",
        )
    state = instance.state[parameter]
    for entry in entries:
        if entry.kind == "tensor":
            _take(states[entry.name], state[entry.name])
        elif entry.kind == "number":
            states[entry.name].fill_(state[entry.name])


def _take(flat: torch.Tensor, value: torch.Tensor) -> None:
    if value.data_ptr() != flat.data_ptr():  # the class updated another tensor than ours
        flat.copy_(value.detach().as_strided((value.numel(),), (1,), value.storage_offset()))


def _is_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if step != expected:
                return tensor.numel() == 0
            expected *= size
    return True
