"""Whole runs of the training stage in this process, of models on the made-up machine of the parity tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.config import ExportConfig, RunConfig, TrainConfig
from stages.runtime.stage import Surroundings, run
from tests.models_for_tests import BY_NAME, SmallModel
from tests.parity.harness import RESIDENT, Variant, config_of, costs_of, plan_of, sliced_costs, traced

ROWS = 2


class Job:
    """A model, its graph and costs, and runs of it under any plan.

    Args:
        folder: Gets scratch files and exports.
        micro_batches: Slices of each batch.
        changes: Fields of `RunConfig`.
    """

    def __init__(
        self, name: str, precision: str, folder: Path, *, micro_batches: int = 1, **changes: Any
    ) -> None:
        self.model: SmallModel = BY_NAME[name]
        self.precision = precision
        self.folder = folder
        self.changes = changes
        self.graph: g.RegionGraph
        self.costs: Costs
        self.graph, self.costs = traced(self.model, precision, ROWS)
        if micro_batches > 1:
            self.changes["train"] = TrainConfig(micro_batches, "mean")
            self.costs = sliced_costs(self.model, precision, ROWS, micro_batches, "mean")
        elif changes:
            self.costs = costs_of(self.graph, self.config())

    def config(self, variant: Variant = RESIDENT, **changes: Any) -> RunConfig:
        config = config_of(
            self.model,
            self.precision,
            rows=ROWS,
            solver=variant.solver,
            lane=variant.lane,
            disk=self.folder / "disk",
            budget=1 if variant.least else 1 << 30,
        )
        return replace(config, **{**self.changes, **changes})

    def plan(self, variant: Variant = RESIDENT) -> Plan:
        return plan_of(self.config(variant), self.graph, self.costs, variant)

    def run(
        self, variant: Variant = RESIDENT, surroundings: Surroundings | None = None, **changes: Any
    ) -> tuple[Summary, dict[str, Tensor]]:
        """Summary and final weights."""
        final = self.folder / "final"
        config = self.config(variant, export=ExportConfig(final=str(final)), **changes)
        plan = self.plan(variant)
        summary, _ = run(config, self.graph, self.costs, plan, None, surroundings)
        [file] = final.glob("*.safetensors")
        return summary, load_file(file)
