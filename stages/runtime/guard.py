"""What stands between gradients and their update: the loss scale, clipping, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError, NumericsError
from stages.artifacts.plan import Plan
from stages.optim.norms import clip_factor
from stages.optim.scaler import LossScaler
from stages.training import LossScaleConfig, TrainConfig


class Guard:
    """Decides about each step's update.

    Attributes:
        skipped_in_a_row: Steps without an update since the last one with.

    Raises:
        ArtifactError: The plan updates inside backward, and these rules need all gradients first.
    """

    def __init__(
        self, graph: g.RegionGraph, plan: Plan, train: TrainConfig, loss_scale: LossScaleConfig | None
    ) -> None:
        deferred = any(phase.name == "update" for phase in plan.phases)
        for rule, made in (
            (train.defers_update(graph.precision), deferred),
            (train.clips, plan.clips),
            (train.accumulate > 1, plan.accumulate > 1),
        ):
            if rule and not made:
                raise ArtifactError(
                    f"the plan was made for another `train`: max_grad_norm={train.max_grad_norm}, "
                    f"skip_limit={train.skip_limit} and accumulate={train.accumulate} need one of their own. "
                    f"Solve again",
                    key="train",
                )
        self._order = [parameter.name for parameter in graph.parameters]
        self._train = train
        self._limit = train.skips_allowed(graph.precision)
        self._deferred = deferred
        self._mixed = False
        self.scaler = LossScaler(loss_scale) if graph.precision == "fp16" else None
        self.skipped_in_a_row = 0

    @property
    def scale(self) -> float:
        """By which the loss of the next step is multiplied."""
        return 1.0 if self.scaler is None else self.scaler.scale

    def factor(self, norm: torch.Tensor) -> float:
        """By which all gradients of that unscaled norm are multiplied."""
        return clip_factor(norm, self._train.max_grad_norm) if self._train.clips else 1.0

    def require_sound(self) -> None:
        """Raises:
        NumericsError: A step has left some parameters updated and others not.
        """
        if self._mixed:
            raise NumericsError(
                "an earlier step has ended between the updates of its parameters, so that they belong to "
                "different steps; go on from a checkpoint"
            )

    def take(self, non_finite: Iterable[str]) -> None:
        """Takes note of a step: skipped where some gradients are not finite, or clean.

        Raises:
            NumericsError: That was one too many in a row.
        """
        names = list(non_finite)
        scale = self.scale
        if self.scaler is not None:
            self.scaler.update(found_non_finite=bool(names))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if names else 0
        self._mixed = bool(names) and not self._deferred
        if self.skipped_in_a_row >= self._limit:
            raise self._error(names, scale)

    def _error(self, names: list[str], scale: float) -> NumericsError:
        first = min(names, key=self._order.index)
        where = first if first == names[0] else f"{first} (in the order of the backward, of {names[0]})"
        steps = "in a step" if self._limit == 1 else f"in {self.skipped_in_a_row} steps in a row"
        what = f"the gradient of {where} has inf or nan {steps}"
        if self.scaler is not None:
            what += f", the last with loss scale {scale:g}"
        done = (
            "No weight was changed by them"
            if self._deferred
            else "Parameters behind it in the model have been updated: go on from a checkpoint, or set "
            "train.skip_limit above 1, under which no update is made before all gradients are known"
        )
        return NumericsError(
            f"{what}; expected finite gradients at least once in {self._limit}. {done}. Look at the loss and "
            f"the data of that step, use a lower learning rate or train.max_grad_norm, or raise "
            f"train.skip_limit",
            key="train.skip_limit",
            found=first,
            expected="finite gradients",
        )
