"""Elementwise optimizers by torch's fused operators, without their classes.

An instance of a `torch.optim` class imports dynamo, which costs 73 MB of the training's budget; the
operators that those classes call are part of torch itself. Semantics follow `fused=True` of
torch.optim.AdamW, Adam, SGD and Adagrad.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from stages.artifacts.costs import StateSpec
from stages.artifacts.errors import ConfigError
from stages.optim.kernel import UpdateKernel

_ATEN = torch.ops.aten


class FusedKernel(UpdateKernel):
    """Base of the elementwise ones: every state is of the parameter's size and dtype."""

    chunkable = True
    state_names: tuple[str, ...] = ()
    initial: float = 0.0
    _settings: Any

    def settings(self) -> dict[str, Any]:
        return asdict(self._settings)

    def with_settings(self, changed: Mapping[str, Any]) -> UpdateKernel:
        for key in ("momentum", "amsgrad"):
            before = getattr(self._settings, key, None)
            if key in changed and bool(changed[key]) != bool(before):
                raise ConfigError(
                    f"{key} becomes {changed[key]} during training, for which no state was planned with "
                    f"{before}; set optimizer.{key} from the start, or keep the scheduler from changing it",
                    key=f"optimizer.{key}",
                    found=str(changed[key]),
                    expected=str(before),
                )
        other = copy(self)
        other._settings = replace(self._settings, **changed)
        return other

    def state_specs(self, shape: Sequence[int], dtype: str = "float32") -> list[StateSpec]:
        return [StateSpec(name, math.prod(shape), dtype) for name in self.state_names]

    def init_state(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
        return {
            state: torch.zeros(tensor.numel(), dtype=dtype)
            if self.initial == 0.0  # pages of zeros cost nothing until they are written
            else torch.full((tensor.numel(),), self.initial, dtype=dtype)
            for state in self.state_names
        }

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
        if not weight.dtype == gradient.dtype == states_dtype(states, weight.dtype):
            raise ValueError(
                f"weight of {weight.dtype} with gradient of {gradient.dtype} and states of "
                f"{states_dtype(states, weight.dtype)}; expected one dtype"
            )
        with torch.no_grad():
            self._apply(weight.detach(), gradient.detach(), states, step, lr)

    @abstractmethod
    def _apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
    ) -> None:
        """Calls the fused operator on flat tensors of the same elements."""


def states_dtype(states: Mapping[str, torch.Tensor], default: torch.dtype) -> torch.dtype:
    return next((state.dtype for state in states.values()), default)


def _step_tensor(step: int, device: torch.device) -> torch.Tensor:
    # the classes count in float32 too, exact up to 2^24 steps
    return torch.full((), float(step), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class AdamSettings:
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    amsgrad: bool = False
    maximize: bool = False


class FusedAdam(FusedKernel):
    """Adam (Kingma and Ba, 2015), or with `decoupled` AdamW (Loshchilov and Hutter, 2019)."""

    def __init__(self, settings: AdamSettings, *, decoupled: bool) -> None:
        self.implementation = "fused_adamw" if decoupled else "fused_adam"
        self._operator = _ATEN._fused_adamw_.default if decoupled else _ATEN._fused_adam_.default
        self._settings = settings
        self.state_names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if settings.amsgrad else ()))

    def _apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
    ) -> None:
        settings = self._settings
        self._operator(
            [weight],
            [gradient],
            [states["exp_avg"]],
            [states["exp_avg_sq"]],
            [states["max_exp_avg_sq"]] if settings.amsgrad else [],
            [_step_tensor(step, weight.device)],
            lr=lr,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            amsgrad=settings.amsgrad,
            maximize=settings.maximize,
        )


@dataclass(frozen=True)
class SGDSettings:
    momentum: float
    weight_decay: float
    dampening: float = 0.0
    nesterov: bool = False
    maximize: bool = False


class FusedSGD(FusedKernel):
    """SGD; with momentum, the first step sets the buffer to the gradient, undampened."""

    implementation = "fused_sgd"

    def __init__(self, settings: SGDSettings) -> None:
        self._settings = settings
        self.state_names = ("momentum_buffer",) if settings.momentum else ()

    def _apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
    ) -> None:
        settings = self._settings
        _ATEN._fused_sgd_.default(
            [weight],
            [gradient],
            [states["momentum_buffer"]] if settings.momentum else [],
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            lr=lr,
            dampening=settings.dampening,
            nesterov=settings.nesterov,
            maximize=settings.maximize,
            is_first_step=step == 1 and settings.momentum != 0,
        )


@dataclass(frozen=True)
class AdagradSettings:
    eps: float
    weight_decay: float
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    maximize: bool = False


class FusedAdagrad(FusedKernel):
    """Adagrad (Duchi, Hazan and Singer, 2011)."""

    implementation = "fused_adagrad"
    state_names = ("sum",)

    def __init__(self, settings: AdagradSettings) -> None:
        self._settings = settings
        self.initial = settings.initial_accumulator_value

    def _apply(
        self,
        weight: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
    ) -> None:
        settings = self._settings
        _ATEN._fused_adagrad_.default(
            [weight],
            [gradient],
            [states["sum"]],
            [_step_tensor(step, weight.device)],
            lr=lr,
            lr_decay=settings.lr_decay,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=settings.maximize,
        )
