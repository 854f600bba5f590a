"""What processes of others took of the processors meanwhile: the noise of a measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def watch_others() -> Callable[[], float]:
    """Starts watching; the function returned gives the share of all processors' time that others took since.

    Others: neither this process nor those of its children that have ended and been waited for.
    """
    before, started = processor_s(), time.monotonic()

    def share() -> float:
        after, elapsed = processor_s(), time.monotonic() - started
        others_s = (after[0] - before[0]) - (after[1] - before[1])
        return min(1.0, max(0.0, others_s / elapsed / (os.cpu_count() or 1)))

    return share


def processor_s() -> tuple[float, float]:
    """Processor seconds of all processes so far (/proc/stat), and of this one and its finished children."""
    columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = sum(int(columns[index]) for index in (0, 1, 2, 5, 6, 7) if index < len(columns))
    own = os.times()
    return ticks / os.sysconf("SC_CLK_TCK"), own.user + own.system + own.children_user + own.children_system
