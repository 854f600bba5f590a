"""One fault and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: outcomes that are right
SAME = "same numbers"
REFUSED = "one error, nothing left"
SAVED = "ended and saved, goes on to the same numbers"


class WrongError(Exception):
    """What must hold after a fault does not; the message says what."""


@dataclass(frozen=True)
class Trial:
    """One fault.

    Attributes:
        kind: The row of the table that it counts in.
        what: The fault in words.
        run: Lets it happen; gives the outcome, or raises `WrongError`.
    """

    kind: str
    what: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """wrong: What did not hold; empty where all did."""

    kind: str
    what: str
    result: str
    seconds: float
    wrong: str = ""


def require(holds: bool, what: str) -> None:
    """Raises:
    WrongError: It does not hold.
    """
    if not holds:
        raise WrongError(what)
