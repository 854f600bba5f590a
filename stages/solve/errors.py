"""What the planner refuses beyond an infeasible budget."""

from __future__ import annotations

from stages.artifacts.errors import ArtifactError


class PlanError(ArtifactError):
    """A program that does not carry out its graph, or could overstep a budget under some timing.

    The message names phase and instruction.
    """

    kind = "plan"
