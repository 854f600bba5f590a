"""Step time against budget: what each byte of memory is worth."""

from __future__ import annotations

from stages.artifacts.graph import Natural, Struct


class CurvePoint(Struct, frozen=True):
    """The fastest plan found for one budget.

    carried: made for a smaller budget, and faster than the one made for this. lower_bound_ns: no plan
    for this budget takes less time; 0 where the solver gives no bound.
    """

    budget_bytes: Natural
    peak_bytes: Natural
    step_ns: Natural
    lower_bound_ns: Natural
    moved_bytes: dict[str, Natural]  # link -> bytes per step
    placement: dict[str, dict[str, Natural]]  # what -> choice -> count
    micro_batches: Natural = 1
    carried: bool = False


class Curve(Struct, frozen=True):
    """Points by ascending budget, from the least feasible to the one in which nothing moves."""

    model: str
    device: str
    precision: str
    solver: str
    tokens: Natural  # of one step
    points: list[CurvePoint]
