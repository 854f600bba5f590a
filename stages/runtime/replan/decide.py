"""When the plan is solved again. Plain numbers in, an answer out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from stages.config import format_size

#: a step that takes this much more or less than predicted is not what was planned with
STEP_TIME_TOLERANCE = 0.15
#: the gain that can be had must be worth this many times what solving again costs: no plan gets all of it
_WORTH = 2.0


@dataclass(frozen=True)
class Observation:
    """The first steps of a run beside what was predicted of them.

    Attributes:
        step_ns: Median over the warm steps.
        margin_bytes: What the plan leaves free of its budget.
        least_step_ns: What no plan saves of a step: each region once each way, and the updates.
        steps_left: After this one.
        price_ns: Saving and reading the training state, solving, and starting again.
    """

    step_ns: int
    predicted_step_ns: int
    peak_bytes: int
    predicted_peak_bytes: int
    margin_bytes: int
    least_step_ns: int
    steps_left: int
    price_ns: int

    @property
    def time_deviation(self) -> float:
        """(measured - predicted) / predicted step time."""
        return self.step_ns / max(1, self.predicted_step_ns) - 1

    @property
    def excess_bytes(self) -> int:
        return self.peak_bytes - self.predicted_peak_bytes

    @property
    def memory_is_off(self) -> bool:
        return 2 * self.excess_bytes > self.margin_bytes

    @property
    def time_is_off(self) -> bool:
        return abs(self.time_deviation) > STEP_TIME_TOLERANCE

    @property
    def may_pay(self) -> bool:
        """Whether another plan could win back what going over to it costs."""
        gain_ns = max(0, self.step_ns - self.least_step_ns) * self.steps_left
        return gain_ns > _WORTH * self.price_ns


class Verdict(Enum):
    AS_PREDICTED = "as predicted"
    GO_ON = "off, but another plan would not win back what going over to it costs"
    SOLVE_AGAIN = "off"


def judge(observation: Observation) -> Verdict:
    """Memory beyond the prediction endangers the budget and is always acted on; time where it pays."""
    if observation.steps_left < 1:
        return Verdict.AS_PREDICTED
    if observation.memory_is_off:
        return Verdict.SOLVE_AGAIN
    if not observation.time_is_off:
        return Verdict.AS_PREDICTED
    return Verdict.SOLVE_AGAIN if observation.may_pay else Verdict.GO_ON


def describe(observation: Observation) -> str:
    """Both deviations, readable."""
    return (
        f"step time {observation.step_ns / 1e9:.3f} s, predicted {observation.predicted_step_ns / 1e9:.3f} s "
        f"({observation.time_deviation:+.0%}); memory {format_size(observation.peak_bytes)}, predicted "
        f"{format_size(observation.predicted_peak_bytes)}"
    )
