"""A checkpoint every so many steps, of which the newest few stay."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from stages.runtime.checkpoint.leftovers import clear_away
from stages.runtime.engine import StepResult
from stages.runtime.progress import say

_FOLDER = re.compile(r"step-([0-9]+)")


class Periodic:
    """A listener of the training loop.

    Args:
        folder: Gets folders step-N.
        every: Steps between checkpoints; 0: only those that are asked for.
        keep: How many stay.
        save: Writes the training state to a folder, in place of one that exists.
    """

    def __init__(self, folder: Path, every: int, keep: int, save: Callable[[Path], None]) -> None:
        self._folder, self._every, self._keep, self._save = folder, every, keep, save
        self._saved = 0
        clear_away(folder)

    def __call__(self, step: int, result: StepResult) -> None:
        if self._every and step % self._every == 0:
            self.save(step)

    def save(self, step: int) -> Path:
        """The checkpoint of `step`, which was the last one; written unless this process has done so."""
        path = self._folder / f"step-{step}"
        if step == self._saved:
            return path
        self._save(path)
        self._saved = step
        say(f"checkpoint of step {step} in {self._folder}")
        # only what came before: a run that goes on from an older checkpoint must not remove its own new one
        older = sorted(number for number in numbers(self._folder) if number <= step)
        for number in older[: -self._keep]:
            shutil.rmtree(self._folder / f"step-{number}")
        return path


def numbers(folder: Path) -> list[int]:
    """The steps of the checkpoints in `folder`."""
    return [int(match.group(1)) for path in folder.iterdir() if (match := _FOLDER.fullmatch(path.name))]
