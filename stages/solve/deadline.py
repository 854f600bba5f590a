"""A time limit that is being used up."""

from __future__ import annotations

import time


class Deadline:
    """Counts down from the moment it is made."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left; negative once they are used up."""
        return self._end - time.monotonic()
