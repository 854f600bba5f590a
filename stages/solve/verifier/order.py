"""Which instruction certainly finishes before which other starts."""

from __future__ import annotations

from stages.artifacts.plan import LANES, Phase
from stages.solve.errors import PlanError

_OPERATIONS_OF = {
    "compute": ("forward", "recompute", "backward", "update", "evaluate", "free"),
    "read": ("read",),
    "write": ("write",),
}


class Order:
    """Happens-before of one phase, from lane order and `after`.

    `known[i]` gives per lane how many of its instructions have certainly finished when i starts.

    Raises:
        PlanError: Ids, lanes, operations or dependencies are malformed.
    """

    def __init__(self, phase: Phase) -> None:
        self.phase = phase
        self.lane: list[int] = []
        self.rank: list[int] = []
        self.known: list[tuple[int, ...]] = []
        latest: list[int | None] = [None] * len(LANES)
        counts = [0] * len(LANES)
        for position, item in enumerate(phase.instructions):
            if item.id != position:
                raise PlanError(f"phase {phase.name}: instruction {item.id} stands at position {position}")
            if item.operation not in _OPERATIONS_OF.get(item.lane, ()):
                raise PlanError(
                    f"phase {phase.name}, instruction {item.id}: lane {item.lane} cannot {item.operation}"
                )
            lane = LANES.index(item.lane)
            known = [0] * len(LANES)
            before = latest[lane]
            for other in (*item.after, *(() if before is None else (before,))):
                if not 0 <= other < position:
                    raise PlanError(
                        f"phase {phase.name}, instruction {item.id} waits for {other}; "
                        f"expected an earlier instruction"
                    )
                known = [max(mine, its) for mine, its in zip(known, self.known[other], strict=True)]
                known[self.lane[other]] = max(known[self.lane[other]], self.rank[other] + 1)
            self.known.append(tuple(known))
            self.lane.append(lane)
            self.rank.append(counts[lane])
            counts[lane] += 1
            latest[lane] = position

    def before(self, first: int, second: int) -> bool:
        """Whether `first` has certainly finished when `second` starts; -1 is the phase's entry."""
        return first < 0 or self.rank[first] < self.known[second][self.lane[first]]

    def name(self, instruction: int) -> str:
        item = self.phase.instructions[instruction]
        what = f" of region {item.region}" if item.region >= 0 else ""
        return f"phase {self.phase.name}, instruction {instruction} ({item.operation}{what})"
