"""T2 with a loss that its batch can spoil."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models_for_tests import GPT2


class Scaled(nn.Module):
    """T2 whose loss is multiplied by the batch's `factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2.build()

    def forward(self, input_ids: Tensor, labels: Tensor, factor: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss * factor


def batches(*factors: float) -> list[dict[str, Any]]:
    """T2's batches, one per factor."""
    plain = GPT2.batches(len(factors))
    return [{**batch, "factor": torch.tensor(factor)} for batch, factor in zip(plain, factors, strict=True)]
