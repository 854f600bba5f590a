"""What a person sees while training runs: a line that stays where it is on a terminal, else one per step.

Drawn by hand: the training process's memory is budgeted, and a library for it takes 7 MB.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from stages.config import format_size

_BAR_WIDTH = 20
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(frozen=True)
class Progress:
    """One step: seconds it took, seconds that the steps left will take; bytes of memory."""

    step: int
    steps: int
    loss: float
    time_s: float
    left_s: float
    tokens: int
    peak_bytes: int
    budget_bytes: int
    skipped: bool

    def text(self) -> str:
        rate = self.tokens / self.time_s if self.time_s else 0.0
        skipped = "  skipped (inf or nan in gradients)" if self.skipped else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.4f}  {self.time_s:.2f} s  {rate:,.0f} tokens/s"
            f"  memory {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}"
            f"  {_duration(self.left_s)} left, ends {_clock(self.left_s)}{skipped}"
        )

    def bar(self) -> str:
        filled = self.step * _BAR_WIDTH // self.steps
        return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] "


def show(progress: Progress) -> None:
    """The state of the run; a terminal has it in place of the one before."""
    if not sys.stdout.isatty():
        print(progress.text(), flush=True)
        return
    columns = os.get_terminal_size(sys.stdout.fileno()).columns
    end = "\n" if progress.step == progress.steps else ""
    line = (progress.bar() + progress.text())[: max(1, columns - 1)]
    print(f"{_CLEAR_LINE}{line}", end=end, flush=True)


def say(message: str) -> None:
    """A line that stays, above the state of the run."""
    begin = _CLEAR_LINE if sys.stdout.isatty() else ""
    print(f"{begin}{message}", flush=True)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if whole < 120:
        return f"{whole} s"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


def _clock(left_s: float) -> str:
    """When that is, with the day where it is not today."""
    end, now = time.localtime(time.time() + left_s), time.localtime()
    today = (end.tm_year, end.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M" if today else "%Y-%m-%d %H:%M", end)
