"""Micro-batches: slices of the step's batch along its rows.

Rows are dealt out as evenly as possible, the first slices getting one more. A last batch that is
shorter than planned is cut into as many slices; with fewer rows than slices, the last slices are
empty and nothing is computed for them, which is exact.
"""

from __future__ import annotations

import msgspec

from stages.artifacts.costs import Costs
from stages.artifacts.errors import ArtifactError, ConfigError
from stages.artifacts.graph import RegionGraph

#: the symbol of the batch's dimension
BATCH = "batch"

VERTICAL, HORIZONTAL = "vertical", "horizontal"
ORDERS = (VERTICAL, HORIZONTAL)

#: how the losses of slices make the batch's loss
LOSSES = ("mean", "token_mean", "sum")


def rows_of_slices(rows: int, micro_batches: int) -> list[int]:
    """Rows of each slice, largest first."""
    least, rest = divmod(rows, micro_batches)
    return [least + (index < rest) for index in range(micro_batches)]


def graph_of_slice(graph: RegionGraph, micro_batches: int) -> RegionGraph:
    """`graph` planned for the largest slice of its batch.

    Raises:
        ConfigError: The graph holds for one batch size only, or has fewer rows than slices.
    """
    if micro_batches == 1:
        return graph
    symbol = graph.symbols.get(BATCH)
    if symbol is None:
        raise ConfigError(
            f"train.micro_batches={micro_batches} needs a batch whose size may vary; the trace fixed it. "
            f"Use trace.dynamic=true and a model that takes batches of any size, or one micro-batch",
            key="train.micro_batches",
            found=str(micro_batches),
            expected="1",
        )
    rows = -(-symbol.planned // micro_batches)
    if micro_batches > symbol.planned or rows < symbol.minimum:
        most = symbol.planned // max(1, symbol.minimum)
        raise ConfigError(
            f"train.micro_batches={micro_batches} cuts a batch of {symbol.planned} rows too small for this "
            f"model, which takes {symbol.minimum} at least; expected 1 to {most}",
            key="train.micro_batches",
            found=str(micro_batches),
            expected=f"1 to {most}",
        )
    planned = msgspec.structs.replace(symbol, planned=rows)
    return msgspec.structs.replace(graph, symbols={**graph.symbols, BATCH: planned})


def costs_of_slice(costs: Costs, micro_batches: int) -> Costs:
    """`costs` as measured on slices of that number.

    Raises:
        ArtifactError: They were not measured.
    """
    if costs.micro_batches == micro_batches:
        return costs
    for known in costs.slices:
        if known.micro_batches == micro_batches:
            peaks = dict(costs.stage_peak_bytes)
            if known.profile_peak_bytes:
                peaks["profile"] = known.profile_peak_bytes
            return msgspec.structs.replace(
                costs, regions=known.regions, micro_batches=micro_batches, stage_peak_bytes=peaks
            )
    raise ArtifactError(
        f"costs are for {costs.micro_batches} micro-batches; expected {micro_batches}. Profile again",
        found=str(costs.micro_batches),
        expected=str(micro_batches),
    )
