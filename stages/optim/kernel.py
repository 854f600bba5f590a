"""What an optimizer's update is to the planner: elements in, elements out, state as named tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from stages.artifacts.costs import StateSpec

#: chunks of a chunkable kernel start and end at multiples of this many elements; the last may be ragged
CHUNK_MULTIPLE = 1024


class UpdateKernel(ABC):
    """The update of one optimizer with fixed settings.

    A *chunkable* kernel gives the same bits whether a parameter is updated at once or in pieces
    that start at multiples of `CHUNK_MULTIPLE` elements: its vector loop then has its scalar tail at
    the same elements. Any other gets whole parameters.
    """

    #: "fused_adamw", "torch.optim.Adafactor", ...
    implementation: str
    chunkable: bool

    def of(self, name: str) -> UpdateKernel:
        """The update of a parameter: this one, for all of them (see `stages.optim.groups`)."""
        return self

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What a param group of this optimizer holds beside its parameters and lr."""

    @abstractmethod
    def with_settings(self, changed: Mapping[str, Any]) -> UpdateKernel:
        """The same update with some settings changed, on the same state.

        Raises:
            ConfigError: They would need another state.
        """

    @abstractmethod
    def state_specs(self, shape: Sequence[int], dtype: str = "float32") -> list[StateSpec]:
        """The state kept of a parameter.

        Args:
            shape: Of the parameter.
            dtype: Of what is updated: the master under bf16 and fp16, else the weight.

        Raises:
            ConfigError: The optimizer cannot take such a parameter.
        """

    @abstractmethod
    def init_state(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state before the first update, flat, by the names in `state_specs`.

        Args:
            name: Of the parameter, for messages.
            tensor: Its initial value.
        """

    @abstractmethod
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
        """Updates `weight` and `states` in place; `gradient` is left as it is.

        Args:
            weight: Weight or fp32 master: flat, in storage order, the whole or (chunkable) a piece.
            gradient: Of the same elements and dtype.
            states: Flat, by name; of the same elements where the state is elementwise.
            step: How many updates of this parameter this one makes, from 1 on.
            lr: Learning rate of this step.
            shape: Of the whole parameter; needed by kernels that are not chunkable.
            stride: Of the whole parameter; None: contiguous.
        """

    def update_low_precision(
        self,
        weight: torch.Tensor,
        master: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
        *,
        inverse_scale: float = 1.0,
        factor: float = 1.0,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
    ) -> None:
        """Updates the fp32 `master`, then rounds it into the bf16 or fp16 `weight`.

        The gradient is cast to fp32 and multiplied there by 1 / (loss scale): a power of two, so
        nothing is rounded. Takes 4 bytes per element while it runs.

        Args:
            weight: Flat piece in the compute dtype.
            master: The same elements in fp32.
            gradient: The same elements in the compute dtype, scaled.
            inverse_scale: 1 / (loss scale).
            factor: By which clipping multiplies the gradient after that.
        """
        if master.dtype != torch.float32:
            raise ValueError(f"master of {master.dtype}; expected torch.float32")
        full = gradient.float()
        if inverse_scale != 1.0:
            # `float` returns its argument when there is nothing to cast: that must not be scaled in place
            full = full.mul_(inverse_scale) if full is not gradient else full * inverse_scale
        if factor != 1.0:
            full = full.mul_(factor) if full is not gradient else full * factor
        self.update(master, full, states, step, lr, shape=shape, stride=stride)
        with torch.no_grad():
            weight.copy_(master)
