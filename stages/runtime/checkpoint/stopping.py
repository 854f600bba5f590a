"""Ends a run that was asked to: between two steps, with its state saved and how to go on said."""

from __future__ import annotations

import shlex

from stages.config import CheckpointConfig
from stages.runtime.checkpoint.periodic import Periodic
from stages.runtime.engine import StepResult
from stages.stopping import Stopped, StopRequest, signal_name


class Ending:
    """A listener of the training loop.

    Args:
        request: Looked at after each step.
        steps: Of the whole run.

    Raises (as a listener):
        Stopped: The request has come.
        StorageError: The state cannot be saved.
    """

    def __init__(
        self, request: StopRequest, checkpoints: Periodic, settings: CheckpointConfig, steps: int
    ) -> None:
        self._request, self._checkpoints, self._settings = request, checkpoints, settings
        self._steps = steps

    def __call__(self, step: int, result: StepResult) -> None:
        if self._request.number:
            raise self.end(step)

    def end(self, step: int) -> Stopped:
        """Saves the state of `step`, where that is wanted."""
        number = self._request.number
        what = f"{signal_name(number)}: stopped after step {step} of {self._steps}"
        if not self._settings.on_stop:
            message = f"{what}; with checkpoint.on_stop=false the state of this step is not kept"
            return Stopped(number, message)
        folder = self._checkpoints.save(step).absolute()
        argument = shlex.quote(f"resume={folder}")
        return Stopped(
            number, f"{what}, its state saved. To go on: the same command with {argument}", str(folder)
        )
