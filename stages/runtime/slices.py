"""From a step's batch to its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import DataError
from stages.artifacts.slicing import BATCH, rows_of_slices
from stages.region.targets import Targets
from stages.runtime.state import MicroBatch

Lookup = Callable[[str], torch.Tensor]


class Slicer:
    """Cuts the batches of one plan.

    Args:
        loss: How the losses of slices make the batch's, as in `Plan.loss`.

    Raises:
        ConfigError: "token_mean" of a loss that is no mean over targets.
    """

    def __init__(self, graph: g.RegionGraph, micro_batches: int, loss: str) -> None:
        self._graph = graph
        self._count = micro_batches
        self._loss = loss
        self._targets = Targets(graph) if micro_batches > 1 and loss == "token_mean" else None

    def cut(
        self, batch: Mapping[str, torch.Tensor], sizes: dict[str, int], lookup: Lookup
    ) -> list[MicroBatch]:
        """The micro-batches: views of `batch`, which fits the graph with `sizes`.

        Slices without a row, or without a target that counts, are empty.

        Args:
            lookup: Finds the graph's constants.

        Raises:
            DataError: A slice has fewer rows than the model takes.
        """
        if self._count == 1:
            return [MicroBatch(dict(batch), sizes)]
        rows = rows_of_slices(sizes[BATCH], self._count)
        self._check(rows)
        found, first = [], 0
        for count in rows:
            inputs = self._rows(batch, first, count)
            found.append(MicroBatch(inputs, {**sizes, BATCH: count}, empty=count == 0))
            first += count
        weights = self._weights(found, lookup)
        return [
            MicroBatch(item.inputs, item.sizes, weight, empty=item.empty or weight == 0)
            for item, weight in zip(found, weights, strict=True)
        ]

    def _check(self, rows: list[int]) -> None:
        least = self._graph.symbols[BATCH].minimum
        short = [count for count in rows if 0 < count < least]
        if short:
            raise DataError(
                f"a batch of {sum(rows)} rows in {self._count} micro-batches gives one of {short[0]}; this "
                f"model takes {least} at least. Leave the batch out or use fewer micro-batches",
                found=str(short[0]),
                expected=f">= {least}",
            )

    def _rows(self, batch: Mapping[str, torch.Tensor], first: int, count: int) -> dict[str, torch.Tensor]:
        sliced = {spec.name for spec in self._graph.inputs if spec.spec.shape[:1] == [BATCH]}
        return {
            name: tensor[first : first + count] if name in sliced else tensor
            for name, tensor in batch.items()
        }

    def _weights(self, slices: list[MicroBatch], lookup: Lookup) -> list[float]:
        """With which factor each slice's loss counts."""
        if self._loss == "sum":
            return [1.0] * len(slices)
        counts = [item.sizes[BATCH] for item in slices]
        if self._targets is not None:
            targets = [
                0 if item.empty else self._targets.count(item.inputs, item.sizes, lookup) for item in slices
            ]
            # without any target, the loss is 0/0 whole and in slices
            counts = targets if any(targets) else counts
        return [count / sum(counts) for count in counts]
