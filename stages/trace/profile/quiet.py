"""Whether this machine was busy with something else while a measurement ran.

Other processes' work only ever adds time, by an amount that no later run will meet again. The kernel
counts processor time of all processes in /proc/stat, and that of this one in times(2).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

#: of the processors' time: less than this is the kernel's own work and rounding of its ticks
QUIET_SHARE = 0.05

#: columns of the first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal (proc(5))
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class Moment:
    """Seconds since some start: of the clock, and of processor time of all and of this process."""

    clock_s: float
    everybody_s: float
    own_s: float

    @staticmethod
    def now() -> Moment:
        own = os.times()
        return Moment(time.monotonic(), _everybody_s(), own.user + own.system)

    def others_share(self) -> float:
        """Share of all processors' time that others took since this moment; 0 to 1."""
        now = Moment.now()
        others = (now.everybody_s - self.everybody_s) - (now.own_s - self.own_s)
        processors = os.cpu_count() or 1
        return min(1.0, max(0.0, others / max(1e-9, processors * (now.clock_s - self.clock_s))))


def _everybody_s() -> float:
    columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = sum(int(columns[index]) for index in _BUSY_COLUMNS if index < len(columns))
    return ticks / os.sysconf("SC_CLK_TCK")
