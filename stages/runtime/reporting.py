"""From a finished loop to its summary."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import Any

from stages.artifacts import graph as g
from stages.artifacts.checkpoint import Checkpoint
from stages.artifacts.costs import Costs
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.process import versions
from stages.runtime.checkpoint.record import placement_digest
from stages.runtime.loop import TrainingLoop

#: of the device tier: to and from the disk on the CPU, host memory beside an accelerator
_LINK_OF_LANE = {"read": "disk_read", "write": "disk_write"}
_LINK_OF_LANE_BESIDE_HOST = {
    "read": "upload", "write": "download", "disk_read": "disk_read", "disk_write": "disk_write"
}  # fmt: skip


def summarise(
    graph: g.RegionGraph,
    costs: Costs,
    plan: Plan,
    loop: TrainingLoop,
    origin: Checkpoint | None = None,
    *,
    replanned: bool = False,
) -> Summary:
    """What `summary.json` says, but for the peaks of the other stages' processes.

    Losses and peaks are of all steps; times and moved bytes of those on this plan.

    Args:
        origin: The state that this process went on from.
        replanned: Whether it was left by a process of the same run, for another plan.
    """
    history = loop.history
    # where no step was left to make, those of the earlier process
    first = loop.steps_before if loop.steps_before < len(history.losses) else 0
    times = history.step_times_s[first:]
    step_time = median(times[1:] or times)
    peak = loop.peak_bytes_so_far
    stage_peaks = {**costs.stage_peak_bytes, "runtime": peak}
    return Summary(
        model=graph.model,
        device=plan.device,
        precision=plan.precision,
        solver=plan.solver,
        optimizer_implementation=plan.implementation,
        threads=costs.threads,
        allocator=loop.device.allocator_name(),
        versions=versions(),
        steps=len(history.losses),
        budget_bytes=plan.budget_bytes,
        peak_bytes=max(stage_peaks.values()),
        peak_bytes_by_stage=stage_peaks,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        baseline_bytes=plan.baseline_bytes,
        least_feasible_bytes=plan.prediction.least_feasible_bytes,
        step_time_s=step_time,
        predicted_step_time_s=plan.prediction.step_ns / 1e9,
        lower_bound_step_time_s=plan.prediction.lower_bound_ns / 1e9 or None,
        optimality_gap=plan.prediction.optimality_gap,
        solve_time_s=plan.solve_ns / 1e9,
        tokens_per_s=history.tokens / step_time,
        micro_batches=plan.placement.micro_batches,
        losses=history.losses,
        grad_norms=history.grad_norms,
        skipped_steps=history.skipped_steps,
        moved_bytes_per_step=_moved_bytes(history.moved_bytes[first:], beside_host=loop.device.beside_host),
        placement=_placement(plan),
        step_peak_bytes=history.step_peak_bytes,
        step_times_s=history.step_times_s,
        evaluations=history.evaluations,
        learning_rates=history.learning_rates,
        loss_scales=history.loss_scales,
        **_origin(plan, origin, replanned=replanned),
    )


def _origin(plan: Plan, origin: Checkpoint | None, *, replanned: bool) -> dict[str, Any]:
    """Where the run's state came from, and what was predicted at its first step."""
    if origin is None:
        peak_bytes, step_ns = plan.prediction.peak_bytes, plan.prediction.step_ns
    else:
        peak_bytes, step_ns = origin.progress.predicted_peak_bytes, origin.progress.predicted_step_ns
    changed = origin is not None and replanned and origin.placement != placement_digest(plan)
    return {
        "replanned_at": origin.step if origin is not None and changed else None,
        "resumed_at": origin.step if origin is not None and not replanned else None,
        "original_predicted_peak_bytes": peak_bytes,
        "original_predicted_step_time_s": step_ns / 1e9,
    }


def _moved_bytes(steps: list[dict[str, int]], *, beside_host: bool) -> dict[str, int]:
    """Median over the steps, per link and direction."""
    links = _LINK_OF_LANE_BESIDE_HOST if beside_host else _LINK_OF_LANE
    return {link: int(median(step.get(lane, 0) for step in steps)) for lane, link in links.items()}


def _placement(plan: Plan) -> dict[str, dict[str, int]]:
    """Counts by choice."""
    placement = plan.placement
    return {
        "weights": dict(Counter(region.weights for region in placement.regions)),
        "activations": dict(Counter(region.activations for region in placement.regions)),
        "optimizer_state": dict(Counter(placement.state.values())),
        "gradients": {placement.gradients: len(placement.state)},
        "values": dict(Counter(placement.values.values())),
    }
