"""Watches a run's first steps, and ends it between two steps where it should go on with another plan."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.errors import StorageError
from stages.artifacts.slicing import costs_of_slice
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig, format_size, parse_size
from stages.runtime import progress
from stages.runtime.checkpoint.write import size_bytes
from stages.runtime.engine import Engine, StepResult
from stages.runtime.loop import TrainingLoop
from stages.runtime.replan.correct import corrected
from stages.runtime.replan.decide import Observation, Verdict, describe, judge
from stages.runtime.replan.measure import least_step_ns, ratios
from stages.runtime.tiers import space

#: steps after the first that are measured: the first one fills caches
_WARM_STEPS = 2


class ReplanRequested(Exception):  # noqa: N818 - no error: the run goes on in another process
    """The training state has been saved and the costs corrected; the plan is to be solved again."""


@dataclass(frozen=True)
class Handover:
    """Where a process leaves what the next one goes on from: the state's folder and the costs' file."""

    state: Path
    costs: Path


class Watch:
    """A listener of the training loop.

    Args:
        predicted: File of the simulator's timeline; read only when something is off.
        startup_ns: What this process took to its first step.
        handover: None: what is found is only said.
        save: Writes the training state to a folder.

    Raises (as a listener):
        ReplanRequested: See there.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loop: TrainingLoop,
        costs: Costs,
        predicted: Path,
        startup_ns: int,
        handover: Handover | None,
        save: Callable[[Path], None],
    ) -> None:
        self._config, self._engine, self._loop, self._costs = config, engine, loop, costs
        self._predicted, self._startup_ns = predicted, startup_ns
        self._handover, self._save = handover, save
        #: nanoseconds of each instruction, per warm step
        self._durations: list[array[int]] = []
        self._step_times_s: list[float] = []

    def __call__(self, step: int, result: StepResult) -> None:
        if len(self._durations) == _WARM_STEPS:
            return
        if step == self._loop.steps_before + 1 or result.skipped:
            return  # a skipped step has no update
        self._durations.append(array("q", (event.end_ns - event.start_ns for event in result.events)))
        self._step_times_s.append(self._loop.history.step_times_s[-1])
        if len(self._durations) == _WARM_STEPS:
            self._act(step)

    def _act(self, step: int) -> None:
        observed = self._observe(step)
        verdict = judge(observed)
        if self._config.solver.replan == "always" and observed.steps_left:
            verdict = Verdict.SOLVE_AGAIN
        if verdict is Verdict.AS_PREDICTED:
            return
        say(f"after step {step}: {describe(observed)}; {verdict.value}")
        if verdict is Verdict.SOLVE_AGAIN and self._handover is not None and self._has_room():
            # what is off by less, the margin is for
            excess_bytes = observed.excess_bytes if observed.memory_is_off else 0
            self._hand_over(self._handover, excess_bytes)

    def _observe(self, step: int) -> Observation:
        plan, history = self._engine.plan, self._loop.history
        return Observation(
            step_ns=round(median(self._step_times_s) * 1e9),
            predicted_step_ns=plan.prediction.step_ns,
            peak_bytes=max(history.step_peak_bytes[self._loop.steps_before :]),
            predicted_peak_bytes=plan.prediction.peak_bytes,
            margin_bytes=plan.margin_bytes,
            least_step_ns=round(median(least_step_ns(plan, step) for step in self._durations)),
            steps_left=self._config.steps - step,
            price_ns=self._price_ns(),
        )

    def _price_ns(self) -> int:
        slowest = min((link.bytes_per_s for link in self._costs.links), default=0)
        moving_ns = 2 * size_bytes(self._engine.homes()) / max(1, slowest) * 1e9
        return round(moving_ns) + self._startup_ns + self._engine.plan.solve_ns

    def _has_room(self) -> bool:
        """Whether the disk takes the state beside the scratch file; training goes on as it is if not."""
        assert self._handover is not None
        needed, disk_budget = size_bytes(self._engine.homes()), self._config.tiers.disk_budget
        room = space.free_bytes(self._handover.state.parent)
        if disk_budget:
            allowed = parse_size(disk_budget, "tiers.disk_budget") - self._engine.plan.disk_bytes
            room = min(room, allowed)
        if needed > room:
            say(
                f"the disk tier has {format_size(max(1, room))} left and the training state takes "
                f"{format_size(needed)}: training goes on with the same plan"
            )
        return needed <= room

    def _hand_over(self, handover: Handover, excess_bytes: int) -> None:
        predicted = envelope.load(self._predicted, Timeline)
        found = ratios(self._engine.plan, self._engine.graph, predicted, self._durations)
        try:
            self._save(handover.state)
        except StorageError as error:
            # the disk may have filled up since; nothing of the state is lost by going on
            say(f"{error}. Training goes on with the same plan")
            return
        # another number of micro-batches would add up gradients in another order
        costs = costs_of_slice(self._costs, self._engine.plan.placement.micro_batches)
        costs = msgspec.structs.replace(costs, slices=[])
        envelope.save(handover.costs, corrected(costs, found, excess_bytes))
        raise ReplanRequested


def say(message: str) -> None:
    progress.say(f"replan: {message}")
