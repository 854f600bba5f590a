"""The training loop: batches in, losses out, memory watched step by step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import torch

from stages.artifacts.timeline import Event, Timeline
from stages.config import RunConfig
from stages.device.interface import Device
from stages.optim.schedule import make_schedule
from stages.runtime.data import Batches
from stages.runtime.engine import Engine, StepResult
from stages.runtime.progress import Progress, say, show


@dataclass
class History:
    """One entry per step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    skipped_steps: list[int] = field(default_factory=list)
    step_times_s: list[float] = field(default_factory=list)
    step_peak_bytes: list[int] = field(default_factory=list)
    moved_bytes: list[dict[str, int]] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)
    #: used in the step, of each param group; of skipped steps those that they would have used
    learning_rates: list[list[float]] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    tokens: int = 0  # of one full batch


class TrainingLoop:
    """Runs `config.steps` steps of `engine` on `batches`.

    Args:
        evaluation: Batches for evaluation, where `config.eval.every` asks for it.

    Attributes:
        history: What was reported so far; where a run goes on, the earlier process's steps too.
        listeners: Called after each step, with its number and result.
    """

    def __init__(
        self, engine: Engine, batches: Batches, config: RunConfig, evaluation: Batches | None = None
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._config = config
        self._evaluation = evaluation
        self.history = History()
        self.listeners: list[Callable[[int, StepResult], None]] = []
        self._events: list[Event] = []
        self._schedule = make_schedule(config.scheduler, engine.optimizer, config.steps)
        engine.optimizer.rates()  # refuses what the planned state does not allow
        #: largest resident memory between steps: imports, initial values, evaluation, saving
        self.peak_between_bytes = 0
        #: steps before those of this process
        self.steps_before = 0

    def start(self) -> None:
        """Random state for step 1: the seed's, so that it does not depend on how initial values were made."""
        torch.manual_seed(self._config.seed)

    def go_on(self, history: History, random_state: torch.Tensor, peak_bytes: int) -> None:
        """Takes over from another process, between two steps, in place of `start`.

        Args:
            peak_bytes: That process's peak where it belongs to this run.
        """
        self.peak_between_bytes = peak_bytes
        self.history = history
        self.steps_before = len(history.losses)
        skipped = set(history.skipped_steps)
        made = [loss for step, loss in enumerate(history.losses, start=1) if step not in skipped]
        self._schedule.replay(made)
        while self.steps_before - self._engine.guard.skipped_in_a_row in skipped:
            self._engine.guard.skipped_in_a_row += 1
        self.device.set_rng_state(random_state)

    def run(self) -> None:
        for step in range(self.steps_before + 1, self._config.steps + 1):
            result = self._step(step)
            if self._config.eval.every and step % self._config.eval.every == 0:
                self._evaluate(step)
            for listener in self.listeners:
                listener(step, result)

    def _step(self, step: int) -> StepResult:
        self.peak_between_bytes = max(self.peak_between_bytes, self.device.peak_bytes())
        self.device.reset_peak()
        started = time.monotonic()
        batches = [self._batches.next() for _ in range(self._config.train.accumulate)]
        result = self._engine.step_over(batches)
        if not result.skipped:
            self._schedule.advance(result.loss)
        elapsed = time.monotonic() - started
        peak = self.device.peak_bytes()
        self._record(step, result, elapsed, peak)
        tokens = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
        self.history.tokens = max(self.history.tokens, tokens)
        self._print_progress(step, result, elapsed, peak)
        return result

    def _record(self, step: int, result: StepResult, elapsed: float, peak: int) -> None:
        history = self.history
        history.losses.append(result.loss)
        history.grad_norms.append(result.grad_norm)
        history.step_times_s.append(elapsed)
        history.step_peak_bytes.append(peak)
        history.moved_bytes.append(result.moved_bytes)
        history.loss_scales.append(result.loss_scale)
        history.learning_rates.append(list(result.learning_rates))
        self._events = result.events
        if result.skipped:
            history.skipped_steps.append(step)

    def _print_progress(self, step: int, result: StepResult, elapsed: float, peak: int) -> None:
        show(
            Progress(
                step=step,
                steps=self._config.steps,
                loss=result.loss,
                time_s=elapsed,
                left_s=(self._config.steps - step) * median(self.history.step_times_s[-5:]),
                tokens=self.history.tokens,
                peak_bytes=peak,
                budget_bytes=self._engine.plan.budget_bytes,
                skipped=result.skipped,
            )
        )

    def _evaluate(self, step: int) -> None:
        assert self._evaluation is not None, "evaluation asked for without data"
        losses = [self._engine.evaluate(self._evaluation.next()) for _ in range(self._config.eval.batches)]
        self._evaluation.seek(0)
        mean = sum(losses) / len(losses)
        self.history.evaluations.append({"step": float(step), "loss": mean})
        say(f"evaluation after step {step}  loss {mean:.4f}")

    @property
    def peak_bytes(self) -> int:
        """The largest resident memory of the run's training processes so far."""
        return max([self.peak_between_bytes, *self.history.step_peak_bytes[self.steps_before :]])

    @property
    def peak_bytes_so_far(self) -> int:
        """`peak_bytes`, and what the device has held since the last step."""
        return max(self.peak_bytes, self.device.peak_bytes())

    @property
    def device(self) -> Device:
        return self._engine.device

    @property
    def timelines(self) -> list[Timeline]:
        """The measured timeline of the last step."""
        return [Timeline("measured", len(self.history.losses), self._events)]
