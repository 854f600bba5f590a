"""The smallest memory limit in which a contender still trains: a search with whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.rivals.contenders import Contender
from benchmarks.rivals.running import Run, run_once
from benchmarks.rivals.workload import Workload

#: limits are multiples of this
GRAIN_BYTES = 64 << 20
#: a first step and one more
_STEPS = 2
#: longer than this, a run in a limit counts as not surviving
_TIMEOUT_S = 300.0


def smallest(survives: Callable[[int], bool], most_bytes: int, grain_bytes: int = GRAIN_BYTES) -> int | None:
    """The least multiple of the grain that survives, by bisection; None where `most_bytes` does not.

    Args:
        survives: Whether a limit is enough; assumed to hold for every larger one too.
    """
    low, high = 0, -(-most_bytes // grain_bytes)
    if not survives(high * grain_bytes):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if survives(middle * grain_bytes):
            high = middle
        else:
            low = middle
    return high * grain_bytes


def smallest_limit(
    contender: Contender,
    workload: Workload,
    work: Path,
    most_bytes: int,
    tell: Callable[[Run], None],
) -> int | None:
    """The smallest memory cgroup that `contender` survives with two steps in 300 s.

    Args:
        tell: Called with every run of the search.
    """

    def survives(limit_bytes: int) -> bool:
        run = run_once(contender, workload, work, _STEPS, limit_bytes=limit_bytes, timeout_s=_TIMEOUT_S)
        tell(run)
        return not run.failure

    return smallest(survives, most_bytes)
