"""The update by any torch optimizer class: one instance per parameter, its state in our tensors.

What such a class keeps of a parameter is found out by running it (`state_layout`). Whole parameters
only: a class may take norms, means or factors over a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch

from stages.artifacts.costs import StateSpec
from stages.artifacts.errors import ConfigError
from stages.optim import probe
from stages.optim.kernel import UpdateKernel
from stages.optim.state_layout import StateEntry, layout_of, load, store


class ClassKernel(UpdateKernel):
    """Drives `optimizer(parameters, lr=..., **arguments)` on one parameter at a time.

    Bitwise what the class does to that parameter alone. Instances are made for each update, so
    nothing but the given state lasts from one to the next; a class that keeps anything elsewhere, or
    lets one parameter's update depend on another's, is refused when the kernel is made.

    Raises:
        ConfigError: Such a class, or one that needs a closure or sparse gradients, or draws random
            numbers.
    """

    chunkable = False

    def __init__(self, optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
        self._class = optimizer
        self._arguments = arguments
        module = "torch.optim" if _is_torchs_own(optimizer) else optimizer.__module__
        self.implementation = f"{module}.{optimizer.__qualname__}"
        self._layouts: dict[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], list[StateEntry]] = {}
        probe.check_independent(optimizer, arguments)

    def settings(self) -> dict[str, Any]:
        probed = probe.construct(self._class, [probe.parameter()], 1e-3, self._arguments)
        return {key: value for key, value in probed.defaults.items() if key != "lr"}

    def with_settings(self, changed: Mapping[str, Any]) -> UpdateKernel:
        other = copy(self)
        other._arguments = {**self._arguments, **changed}
        return other

    def state_specs(self, shape: Sequence[int], dtype: str = "float32") -> list[StateSpec]:
        """As in the base class. Makes a parameter of that shape and its state, for a moment."""
        entries = self._layout(tuple(shape), _contiguous(shape), getattr(torch, dtype))
        return [
            StateSpec(entry.name, entry.elements, str(entry.dtype).removeprefix("torch."))
            for entry in entries
            if entry.stored
        ]

    def init_state(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Zeros: the class makes its own state in the first update."""
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        entries = self._layout(tuple(tensor.shape), tuple(tensor.stride()), dtype)
        stored = [entry for entry in entries if entry.stored]
        return {entry.name: torch.zeros(entry.elements, dtype=entry.dtype) for entry in stored}

    def update(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
        *,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> None:
        if shape is None:
            raise ValueError(f"{self.implementation} updates whole parameters and needs their shape")
        if weight.numel() != math.prod(shape):
            raise ValueError(f"{weight.numel()} elements of shape {tuple(shape)}; expected all")
        strides = tuple(stride) if stride is not None else _contiguous(shape)
        parameter = torch.nn.Parameter(_shaped(weight, shape, strides))
        parameter.grad = _shaped(gradient, shape, strides)
        instance = probe.construct(self._class, [parameter], lr, self._arguments)
        entries = self._layout(tuple(shape), strides, weight.dtype)
        if step > 1:
            load(instance, parameter, entries, states, step)
        instance.step()
        store(instance, parameter, entries, states, step)

    def _layout(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> list[StateEntry]:
        key = (shape, stride, dtype)
        if key not in self._layouts:
            self._layouts[key] = self._probe_layout(*key)
        return self._layouts[key]

    def _probe_layout(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> list[StateEntry]:
        parameter = torch.nn.Parameter(torch.empty_strided(shape, stride, dtype=dtype).fill_(0.5))
        with probe.refusals(self._class, f"a parameter of shape {list(shape)}"):
            instance = probe.construct(self._class, [parameter], 1e-3, self._arguments)
            kept = []
            for _ in range(2):
                parameter.grad = torch.full_like(parameter, 0.25)
                instance.step()
                kept.append(layout_of(instance, parameter, counts=_is_torchs_own(self._class)))
        if kept[0] != kept[1]:
            raise ConfigError(
                f"the state that {self.implementation} keeps of a parameter changes its shape between steps; "
                f"expected tensors and numbers of fixed size. Use another optimizer",
                key="optimizer.name",
                found=self.implementation,
                expected="state of fixed size",
            )
        return kept[0]


def _is_torchs_own(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether state["step"] is known to be the number of updates, so that it need not be kept."""
    return f"{optimizer.__module__}.".startswith("torch.optim.")


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _shaped(flat: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """A flat span of memory as the parameter that it holds."""
    return flat.detach().as_strided(tuple(shape), tuple(stride), flat.storage_offset())
