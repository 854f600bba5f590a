"""The CPU: its memory is the device tier, and the next tier is the disk."""

from __future__ import annotations

from collections.abc import Callable

import torch

from stages.device.interface import Result, Streams
from stages.device.pages import storage_on_pages
from stages.region import memory


class Cpu:
    """See `stages.device.interface.Device`. Memory is that of the whole process, interpreter included."""

    name = "cpu"
    target = torch.device("cpu")
    beside_host = False

    def streams(self, *, late: bool) -> Streams | None:
        return None

    def begin(self, budget_bytes: int) -> None:
        """The process was started under its budget; `stages.room` has looked for what is free."""

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        return storage_on_pages(size_bytes)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        size = torch.get_rng_state().numel()
        if state.numel() < size:
            raise ValueError(f"random state of {state.numel()} bytes; expected {size}")
        # an accelerator's state follows that of the CPU
        torch.set_rng_state(state[:size].clone())

    def synchronize(self) -> None:
        """What returns has run."""

    def peak_of(self, work: Callable[[], Result]) -> tuple[Result, int] | None:
        return None

    def held_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int | None:
        return None

    def peak_bytes(self) -> int:
        return memory.peak_resident_bytes()

    def reset_peak(self) -> bool:
        return memory.reset_peak()

    def allocator_name(self) -> str:
        return memory.allocator_name()
