"""What the search tries beside what the model decides: memory kept free, and what for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

#: shares of the memory beside the process that are kept free for what the model takes for fluid: chunks
#: and activations on their way, which take all their memory from the first byte to the last
RESERVES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.23)
#: chunks in it: on their way in, in update, on their way out
CHUNKS = (3, 6, 12, 24)
#: share of it that goes to slots; activations that move take the rest
SHARES = (1.0, 0.6, 0.3, 0.0)
#: factors on the reserve that leave the discrete choices as they are
SCALES = (0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.45)
UNSCALED = 4


@dataclass(frozen=True)
class Setting:
    """What rounding does not get from the model; indices into `RESERVES`, `CHUNKS`, `SHARES` and
    `SCALES`."""

    reserve: int
    chunks: int
    share: int
    scale: int


def starts(reserve: int) -> list[Setting]:
    """Settings around a reserve, to begin with."""
    last = len(RESERVES) - 1
    found = [
        Setting(reserve, 1, 1, UNSCALED),
        Setting(min(last, reserve + 1), 1, 2, UNSCALED),
        Setting(max(0, reserve - 1), 1, 1, UNSCALED),
        Setting(min(last, reserve + 2), 2, 2, UNSCALED),
    ]
    return list(dict.fromkeys(found))


def neighbours(setting: Setting) -> Iterator[Setting]:
    limits = {
        "reserve": len(RESERVES),
        "chunks": len(CHUNKS),
        "share": len(SHARES),
        "scale": len(SCALES),
    }
    for name, count in limits.items():
        for step in (-1, 1):
            moved = getattr(setting, name) + step
            if 0 <= moved < count:
                yield replace(setting, **{name: moved})
