"""When a buffer that may wait on disk is on the device, in region slots.

Slots number the regions' turns in a step: forward of region r is slot r, its backward slot
2R-1-r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """On the device from the start of slot `fetch` to the use in slot `last`."""

    fetch: int
    first: int
    last: int


def windows(uses: Iterable[int], lead: Callable[[int], int], lag: int = 0) -> list[Window]:
    """Groups ascending `uses` so that a buffer leaves only where that frees at least one slot.

    Args:
        uses: Slots that need the buffer on the device.
        lead: How many slots before a use its fetch may start.
        lag: For how many slots after a use the buffer is still being written.
    """
    found: list[Window] = []
    for use in uses:
        fetch = max(0, use - lead(use))
        if found and fetch < found[-1].last + 2 + lag:
            found[-1] = Window(found[-1].fetch, found[-1].first, use)
        else:
            found.append(Window(fetch, use, use))
    return found
