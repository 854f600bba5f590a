"""What a plan promises, from its artifacts alone: nothing has run."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph, Struct
from stages.artifacts.plan import Plan
from stages.config import RunConfig, format_size

_NS_PER_S = 1e9


class Forecast(Struct, frozen=True, omit_defaults=False):
    """`forecast.json`: seconds, bytes and counts; see the field names for units."""

    model: str
    hardware: str
    device: str
    precision: str
    solver: str
    parameters: int
    batch_size: int
    seq_len: int
    micro_batches: int
    budget_bytes: int
    predicted_peak_bytes: int
    least_feasible_bytes: int
    predicted_step_time_s: float
    tokens_per_s: float
    compute_time_s: float  # forward and backward of every region once, recomputes apart
    lower_bound_step_time_s: float | None  # None: the solver gives no bound
    optimality_gap: float | None
    host_bytes: int
    disk_bytes: int
    moved_bytes_per_step: dict[str, int]  # "upload", "download", "disk_read", "disk_write"
    placement: dict[str, dict[str, int]]  # what -> choice -> count
    solve_time_s: float
    binding: str


def forecast(config: RunConfig, graph: RegionGraph, costs: Costs, plan: Plan) -> Forecast:
    """Reads a plan for hardware that need not be here."""
    step_s = plan.prediction.step_ns / _NS_PER_S
    tokens = config.data.batch_size * config.data.seq_len
    by_kind = {cost.kind: cost.forward_ns + cost.backward_ns for cost in costs.regions}
    bound_ns = getattr(plan.prediction, "lower_bound_ns", None)
    return Forecast(
        model=config.model.name,
        hardware=config.hardware.name,
        device=plan.device,
        precision=plan.precision,
        solver=plan.solver,
        parameters=sum(
            _elements(parameter.spec.shape) for parameter in graph.parameters if parameter.requires_grad
        ),
        batch_size=config.data.batch_size,
        seq_len=config.data.seq_len,
        micro_batches=plan.placement.micro_batches,
        budget_bytes=plan.budget_bytes,
        predicted_peak_bytes=plan.prediction.peak_bytes,
        least_feasible_bytes=plan.prediction.least_feasible_bytes,
        predicted_step_time_s=step_s,
        tokens_per_s=tokens / step_s,
        compute_time_s=sum(by_kind[region.kind] for region in graph.regions) / _NS_PER_S,
        lower_bound_step_time_s=bound_ns / _NS_PER_S if bound_ns else None,
        optimality_gap=plan.prediction.step_ns / bound_ns - 1 if bound_ns else None,
        host_bytes=plan.host_bytes,
        disk_bytes=plan.disk_bytes,
        moved_bytes_per_step=_moved(plan),
        placement=count_choices(plan),
        solve_time_s=plan.solve_ns / _NS_PER_S,
        binding=plan.prediction.binding,
    )


def _elements(shape: list) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _moved(plan: Plan) -> dict[str, int]:
    """Bytes of each link and step; what passes through to the disk counts on both of its links."""
    moved = plan.prediction.moved_bytes
    return {
        "upload": moved.get("read", 0),
        "download": moved.get("write", 0),
        "disk_read": moved.get("disk_read", 0),
        "disk_write": moved.get("disk_write", 0),
    }


def count_choices(plan: Plan) -> dict[str, dict[str, int]]:
    """How often each choice was made."""
    placement = plan.placement
    return {
        "weights": dict(Counter(region.weights for region in placement.regions)),
        "activations": dict(Counter(region.activations for region in placement.regions)),
        "optimizer state": dict(Counter(placement.state.values())),
        "values": dict(Counter(placement.values.values())),
        "gradients": {placement.gradients: 1},
    }


def print_forecast(found: Forecast, folder: str, console: Console | None = None) -> None:
    table = Table(
        title=f"{found.model} on {found.hardware}: a plan, nothing has run",
        show_header=False,
        title_justify="left",
    )
    for name, value in _rows(found, folder).items():
        table.add_row(name, value)
    (console or Console()).print(table)


def _rows(found: Forecast, folder: str) -> dict[str, str]:
    budget = format_size(found.budget_bytes)
    bound, gap = found.lower_bound_step_time_s, found.optimality_gap
    rows = {
        "model": f"{found.parameters / 1e9:.2f} billion parameters",
        "batch": f"{found.batch_size} x {found.seq_len} tokens, micro-batches: {found.micro_batches}",
        **{
            what: ", ".join(f"{count} {choice}" for choice, count in sorted(choices.items()))
            for what, choices in found.placement.items()
            if what != "gradients" and choices
        },
        "gradients": next(iter(found.placement["gradients"])),
        "step time": f"{found.predicted_step_time_s:.3f} s (regions compute {found.compute_time_s:.3f} s)",
        "tokens per second": f"{found.tokens_per_s:.1f}",
    }
    if bound is not None and gap is not None:
        rows["lower bound"] = f"{bound:.3f} s (gap {gap:.1%})"
    rows |= {
        "peak on the device": f"{format_size(found.predicted_peak_bytes)} of {budget}",
        "least feasible budget": format_size(found.least_feasible_bytes),
        "host memory": format_size(found.host_bytes),
        "disk": format_size(found.disk_bytes),
        "moved per step": ", ".join(
            f"{link} {format_size(size)}" for link, size in found.moved_bytes_per_step.items()
        ),
        "solver": f"{found.solver}, {found.precision}, {found.solve_time_s:.1f} s",
        "files": f"{folder}/forecast.json, plan.json, costs.json, graph.json",
    }
    return rows
