"""The solvers, by name: one signature, `solve(task) -> Solution`."""

from __future__ import annotations

from collections.abc import Callable

from stages.solve.solvers import auto, greedy_async, greedy_sync, layerwise, milp, resident
from stages.solve.task import Solution, Task

SOLVERS: dict[str, Callable[[Task], Solution]] = {
    "resident": resident.solve,
    "layerwise": layerwise.solve,
    "greedy_sync": greedy_sync.solve,
    "greedy_async": greedy_async.solve,
    "milp": milp.solve,
    "auto": auto.solve,
}
