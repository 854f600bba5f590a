"""What happens between a step's gradients and its update: the configuration of it.

Needs neither Hydra nor torch, like `stages.config`, whose sections these are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from stages.artifacts.errors import ConfigError

LOSSES = ("auto", "mean", "token_mean", "sum")

#: consecutive steps that fp16 may skip by default: from the initial scale to the least one there are 16
#: halvings, and one more overflow before the first of them
FP16_SKIP_LIMIT = 20


def require(condition: bool, key: str, found: object, expected: str) -> None:
    """Raises a ConfigError that names `key`, unless `condition` holds or the value is not given yet."""
    if not condition and found != "???":
        raise ConfigError(
            f"{key}={found} cannot be used; expected {expected}", key=key, found=str(found), expected=expected
        )


@dataclass
class TrainConfig:
    """How a step goes through its batches, and what is checked before its update.

    micro_batches: slices that a batch is cut into; their gradients add up to the batch's.
    loss: how the losses of slices make the batch's loss. "auto": found out by running the model on
    a few rows, whole and in slices; refused where they do not. Declared: "mean" over rows,
    "token_mean" over the targets of a cross entropy that are not ignored, "sum".
    accumulate: batches of one step. Each goes forward and backward by itself, its loss divided by their
    number, and their gradients add up before the one update.
    max_grad_norm: 2-norm to which all unscaled gradients together are scaled down; 0: as they are.
    skip_limit: consecutive steps without an update, for inf or nan in a gradient, after which the run
    ends. 1: at the first one. 0: 20 under fp16, whose loss scale needs some, and 1 otherwise.
    """

    micro_batches: int = 1
    loss: str = "auto"
    accumulate: int = 1
    max_grad_norm: float = 0.0
    skip_limit: int = 0

    def __post_init__(self) -> None:
        require(self.micro_batches >= 1, "train.micro_batches", self.micro_batches, "at least 1")
        require(self.loss in LOSSES, "train.loss", self.loss, "one of " + ", ".join(LOSSES))
        require(self.accumulate >= 1, "train.accumulate", self.accumulate, "at least 1")
        in_range = math.isfinite(self.max_grad_norm) and self.max_grad_norm >= 0
        require(in_range, "train.max_grad_norm", self.max_grad_norm, "a finite number, at least 0 (0: none)")
        require(self.skip_limit >= 0, "train.skip_limit", self.skip_limit, "at least 0 (0: by precision)")

    @property
    def clips(self) -> bool:
        return self.max_grad_norm > 0

    def skips_allowed(self, precision: str) -> int:
        """The number of consecutive steps with non-finite gradients that ends the run."""
        return self.skip_limit or (FP16_SKIP_LIMIT if precision == "fp16" else 1)

    def defers_update(self, precision: str) -> bool:
        """Whether every gradient must be known before the first update: what is not must not be undone."""
        skips = self.skips_allowed(precision) > 1
        return precision == "fp16" or skips or self.clips or self.accumulate > 1


@dataclass
class LossScaleConfig:
    """The dynamic loss scale of fp16: numbers are powers of two, so that scaling rounds nothing.

    It grows by `growth_factor` after `growth_interval` steps in a row without overflow, and shrinks by
    `backoff_factor` at each overflow from the `hysteresis`-th on, counted since it last grew.
    """

    initial: float = 2.0**16
    growth_factor: float = 2.0
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        for name in ("initial", "growth_factor", "backoff_factor", "minimum", "maximum"):
            value = getattr(self, name)
            require(_is_power_of_two(value), f"loss_scale.{name}", value, "a power of two")
        ordered = self.minimum <= self.initial <= self.maximum
        require(ordered, "loss_scale.initial", self.initial, f"{self.minimum} to {self.maximum}")
        require(self.growth_factor > 1, "loss_scale.growth_factor", self.growth_factor, "more than 1")
        require(self.backoff_factor < 1, "loss_scale.backoff_factor", self.backoff_factor, "less than 1")
        require(self.growth_interval >= 1, "loss_scale.growth_interval", self.growth_interval, "at least 1")
        require(self.hysteresis >= 1, "loss_scale.hysteresis", self.hysteresis, "at least 1")


def _is_power_of_two(value: float) -> bool:
    return math.isfinite(value) and value > 0 and math.frexp(value)[0] == 0.5


@dataclass
class SchedulerConfig:
    """How the learning rate changes from update to update; skipped steps do not count.

    name: "none"; "linear" or "cosine": rises over `warmup` updates, then falls to `final` times the
    learning rate at the last step; or a class: "torch.optim.lr_scheduler.OneCycleLR", "StepLR", ...
    arguments: of the class. A function is given by its import path.
    """

    name: str = "none"
    warmup: int = 0
    final: float = 0.0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(bool(self.name), "scheduler.name", self.name, "none, linear, cosine or a class by name")
        require(self.warmup >= 0, "scheduler.warmup", self.warmup, "at least 0 updates")
        in_range = math.isfinite(self.final) and self.final >= 0
        require(in_range, "scheduler.final", self.final, "a finite share of the learning rate, at least 0")
        builtin = self.name in ("linear", "cosine")
        unused = self.warmup == 0 and self.final == 0
        require(builtin or unused, "scheduler.warmup", self.warmup, "nothing, but for linear and cosine")
        takes = bool(self.arguments) and (builtin or self.name == "none")
        require(not takes, "scheduler.arguments", self.arguments, f"nothing for {self.name}")
