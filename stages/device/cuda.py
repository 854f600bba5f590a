"""CUDA devices, by torch's caching allocator, streams and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from stages.artifacts.errors import InfeasibleBudgetError
from stages.device.interface import COMPUTE, Result, Streams


class CudaStreams:
    """See `stages.device.interface.Streams`. "compute" is the stream that was current when this was made."""

    def __init__(self, target: torch.device) -> None:
        self._target = target
        self._streams = {COMPUTE: torch.cuda.current_stream(target)}

    @contextmanager
    def on(self, lane: str) -> Iterator[None]:
        if lane not in self._streams:
            self._streams[lane] = torch.cuda.Stream(self._target)
        with torch.cuda.device(self._target), torch.cuda.stream(self._streams[lane]):
            yield

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._target))
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._target).wait_event(mark)

    def finish(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(source, non_blocking=True)

    def fill(self, target: torch.Tensor, byte: int) -> None:
        with torch.no_grad():
            target.fill_(byte)

    def let_go(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Blocks go back to the pool of "compute", from which all are taken: its order keeps them apart."""

    def settle(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def between_ns(self, first: torch.cuda.Event, second: torch.cuda.Event) -> int:
        return round(first.elapsed_time(second) * 1e6)


class Cuda:
    """See `stages.device.interface.Device`. Memory is what the caching allocator has reserved."""

    name = "cuda"
    beside_host = True

    def __init__(self) -> None:
        self.target = torch.device("cuda", torch.cuda.current_device())
        self._compute = torch.cuda.current_stream(self.target)

    def streams(self, *, late: bool) -> Streams:
        return CudaStreams(self.target)

    def begin(self, budget_bytes: int) -> None:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.target)
        held = torch.cuda.memory_reserved(self.target)
        if budget_bytes > free + held:
            raise InfeasibleBudgetError(
                f"budget={budget_bytes} bytes is more than {torch.cuda.get_device_name(self.target)} has "
                f"free: {free + held} of {total} bytes. Use a smaller budget, or end what else runs there",
                key="budget",
                found=str(budget_bytes),
                expected=f"at most {free + held} bytes",
            )
        torch.cuda.set_per_process_memory_fraction(budget_bytes / total, self.target)
        torch.cuda.reset_peak_memory_stats(self.target)

    def new_storage(self, size_bytes: int) -> torch.UntypedStorage:
        # From the pool of "compute", like every other block: memory that a region freed serves a lane and
        # the other way round. Its last user may still be waiting in that queue, so the lane's waits for it.
        with torch.cuda.stream(self._compute):
            storage = torch.UntypedStorage(size_bytes, device=self.target)
        torch.cuda.current_stream(self.target).wait_stream(self._compute)
        return storage

    def rng_state(self) -> torch.Tensor:
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(self.target)])

    def set_rng_state(self, state: torch.Tensor) -> None:
        host, device = torch.get_rng_state().numel(), torch.cuda.get_rng_state(self.target).numel()
        if state.numel() not in (host, host + device):
            raise ValueError(f"random state of {state.numel()} bytes; expected {host} or {host + device}")
        torch.set_rng_state(state[:host].clone())
        if state.numel() == host:
            # a run that comes from a CPU: its masks go on from the seed that its generator was given
            torch.cuda.manual_seed(torch.initial_seed())
        else:
            torch.cuda.set_rng_state(state[host:].clone(), self.target)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.target)

    def peak_of(self, work: Callable[[], Result]) -> tuple[Result, int] | None:
        self.synchronize()
        torch.cuda.reset_peak_memory_stats(self.target)
        before = torch.cuda.memory_allocated(self.target)
        result = work()
        self.synchronize()
        return result, max(0, torch.cuda.max_memory_allocated(self.target) - before)

    def held_bytes(self) -> int:
        # cuBLAS asks the allocator for its workspace, once per handle and stream
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.target)

    def free_bytes(self) -> int | None:
        free, _ = torch.cuda.mem_get_info(self.target)
        cached = torch.cuda.memory_reserved(self.target) - torch.cuda.memory_allocated(self.target)
        return free + cached

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self.target)

    def reset_peak(self) -> bool:
        torch.cuda.reset_peak_memory_stats(self.target)
        return True

    def allocator_name(self) -> str:
        return f"CUDA {torch.cuda.get_allocator_backend()}"
