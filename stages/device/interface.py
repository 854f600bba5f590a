"""What every device offers.

An accelerator runs behind the thread that drives it: an operator or copy is *issued* into a queue, and
whoever needs its result waits for a *mark* in that queue, in another queue or on the host. A lane of
the plan is such a queue. The CPU has none: there, what returns has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

COMPUTE = "compute"
Result = TypeVar("Result")

#: a point in a queue; what it is depends on the device
Mark = Any


class Streams(Protocol):
    """The queues of an accelerator, one per lane of the plan, and "compute", where operators go."""

    def on(self, lane: str) -> AbstractContextManager[None]:
        """Makes a lane's queue the one into which the calling thread issues."""
        ...

    def mark(self) -> Mark:
        """The point that the calling thread's queue has come to."""
        ...

    def wait(self, mark: Mark) -> None:
        """What is issued from now on into the calling thread's queue starts after `mark`; returns at once."""
        ...

    def finish(self, mark: Mark) -> None:
        """Returns when everything before `mark` has run."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Issues a copy between tensors of equal size, of which one may be in pinned host memory.

        Both must stay alive until a mark after it has been waited for.
        """
        ...

    def fill(self, target: torch.Tensor, byte: int) -> None:
        """Issues a fill of a uint8 tensor."""
        ...

    def let_go(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Says that the allocator may now give this memory to what is issued next into "compute"."""
        ...

    def settle(self) -> None:
        """Returns when all queues are empty."""
        ...

    def between_ns(self, first: Mark, second: Mark) -> int:
        """Nanoseconds between two marks that have been passed."""
        ...


class Device(Protocol):
    """Where regions run and planned memory lies.

    Attributes:
        name: As in `Costs.device` and `Plan.device`.
        target: Where tensors are made.
        beside_host: Whether it has memory of its own, so that host memory is the next tier.
    """

    name: str
    target: torch.device
    beside_host: bool

    def streams(self, *, late: bool) -> Streams | None:
        """Its queues; None where every call returns only when it has run.

        Args:
            late: Whether what need not have run yet should not have (tests); as far as the device can.
        """
        ...

    def begin(self, budget_bytes: int) -> None:
        """Before the first tensor of training: its memory counts from here, and may not pass the budget.

        Raises:
            InfeasibleBudgetError: The device has less than that.
        """
        ...

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        """Memory for what a lane brings back; what the calling thread's queue does to it comes after the
        last use of whoever had it before."""
        ...

    def rng_state(self) -> torch.Tensor:
        """State of every generator that operators there draw from, as bytes on the CPU."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Sets what `rng_state` gave, here or on another kind of device.

        Raises:
            ValueError: It is no such state.
        """
        ...

    def synchronize(self) -> None:
        """Returns when all that was issued has run."""
        ...

    def peak_of(self, work: Callable[[], Result]) -> tuple[Result, int] | None:
        """Runs `work`: its result, and the most bytes of the allocator beyond those before; None where the
        process's memory is the gauge."""
        ...

    def held_bytes(self) -> int:
        """What libraries hold of its memory, where no tensor is alive."""
        ...

    def free_bytes(self) -> int | None:
        """Room for tensors; None where it is host memory."""
        ...

    def peak_bytes(self) -> int:
        """The largest memory since the last `reset_peak`, as budgets count it."""
        ...

    def reset_peak(self) -> bool:
        """Returns whether the peak now counts from here."""
        ...

    def allocator_name(self) -> str:
        """What serves its memory."""
        ...
