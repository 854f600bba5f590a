"""Whole runs of the training stage in this process, of models on the made-up machine of the parity tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from stages.artifacts import graph as g
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.config import ExportConfig, RunConfig
from stages.runtime.stage import Surroundings, run
from tests.models_for_tests import BY_NAME, SmallModel
from tests.parity.harness import RESIDENT, Variant, config_of, costs_of, plan_of, traced

ROWS = 2


class Job:
    """A model, its graph and costs, and runs of it under any plan.

    Args:
        folder: Gets scratch files and exports.
        changes: Fields of `RunConfig`.
    """

    def __init__(self, name: str, precision: str, folder: Path, **changes: object) -> None:
        self.model: SmallModel = BY_NAME[name]
        self.precision = precision
        self.folder = folder
        self.changes = changes
        self.graph: g.RegionGraph
        self.costs: Costs
        self.graph, self.costs = traced(self.model, precision, ROWS)
        if changes:
            self.costs = costs_of(self.graph, self.config())

    def config(self, variant: Variant = RESIDENT, **changes: object) -> RunConfig:
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
        self, variant: Variant = RESIDENT, surroundings: Surroundings | None = None, **changes: object
    ) -> tuple[Summary, dict[str, Tensor]]:
        """Summary and final weights."""
        final = self.folder / "final"
        config = self.config(variant, export=ExportConfig(final=str(final)), **changes)
        plan = self.plan(variant)
        summary, _ = run(config, self.graph, self.costs, plan, None, surroundings)
        [file] = final.glob("*.safetensors")
        return summary, load_file(file)
