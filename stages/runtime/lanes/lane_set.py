"""Runs a phase: compute in the calling thread, the transfers in their lanes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import LANES, Instruction
from stages.runtime.lanes.adversarial import LateLane
from stages.runtime.lanes.cpu import ThreadLane
from stages.runtime.lanes.interface import Board, Event, Lane, LanesStoppedError

COMPUTE = "compute"


@dataclass(frozen=True)
class Timing:
    """When one instruction ran; nanoseconds of `time.perf_counter_ns`."""

    instruction: int
    lane: str
    start_ns: int
    end_ns: int


class LaneSet:
    """The lanes of one device, kept over many phases.

    Args:
        lanes: Every lane but compute, by name.
    """

    def __init__(self, lanes: Mapping[str, Lane]) -> None:
        self._lanes = dict(lanes)

    @staticmethod
    def of_kind(kind: str) -> LaneSet:
        """Lanes by their name in the configuration: "cpu" (threads) or "adversarial" (tests)."""
        names = [name for name in LANES if name != COMPUTE]
        if kind == "adversarial":
            return LaneSet({name: LateLane() for name in names})
        if kind == "cpu":
            return LaneSet({name: ThreadLane(name) for name in names})
        raise ValueError(f"lane kind {kind!r}; expected cpu or adversarial")

    def run(
        self,
        instructions: Sequence[Instruction],
        perform: Callable[[Instruction], None],
        on_free: Callable[[int], None],
    ) -> list[Timing]:
        """Carries out a phase and returns when all of it is done.

        Transfers are queued at once and start when their lane has come to them and all of `after`
        has finished, in the lane's thread. Compute instructions run in the calling thread, in order.

        Args:
            instructions: In topological order, each one's `id` its position.
            perform: Runs one instruction; called in the thread of the instruction's lane.
            on_free: Called with each buffer in `frees` once the instruction has run and before
                anything that waits for it starts, in the same thread.

        Returns:
            One timing per instruction, in the order of the list.

        Raises:
            Whatever `perform` or `on_free` raised first, in any lane, after every lane has stopped:
            transfers that had not started are dropped.
        """
        _check(instructions, self._lanes)
        board = Board()
        events = [Event(board) for _ in instructions]
        jobs = [_bind(instruction, perform, on_free) for instruction in instructions]
        try:
            self._submit(instructions, jobs, events, board)
            _compute(instructions, jobs, events, board)
            self._drain()
        except LanesStoppedError:
            pass  # what stopped the lanes is raised below
        except BaseException as error:  # noqa: BLE001 - raised below, once the lanes have stopped
            board.fail(error)
        if board.failure is not None:
            self._drain()
            raise board.failure
        return [
            Timing(instruction.id, instruction.lane, event.start_ns, event.end_ns)
            for instruction, event in zip(instructions, events, strict=True)
        ]

    def close(self) -> None:
        """Ends all lanes and their threads. Safe to call twice."""
        for lane in self._lanes.values():
            lane.close()

    def __enter__(self) -> LaneSet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(
        self,
        instructions: Sequence[Instruction],
        jobs: Sequence[Callable[[], None]],
        events: list[Event],
        board: Board,
    ) -> None:
        """Queues the transfers; each one's event takes its place in `events`."""
        for instruction, job in zip(instructions, jobs, strict=True):
            if instruction.lane != COMPUTE:
                after = [events[dependency] for dependency in instruction.after]
                events[instruction.id] = self._lanes[instruction.lane].submit(job, after, board)

    def _drain(self) -> None:
        for lane in self._lanes.values():
            lane.drain()


def _compute(
    instructions: Sequence[Instruction],
    jobs: Sequence[Callable[[], None]],
    events: Sequence[Event],
    board: Board,
) -> None:
    for instruction, job in zip(instructions, jobs, strict=True):
        if instruction.lane != COMPUTE:
            continue
        for dependency in instruction.after:
            events[dependency].wait()
        if board.failure is not None:
            raise LanesStoppedError
        events[instruction.id].run(job)


def _bind(
    instruction: Instruction, perform: Callable[[Instruction], None], on_free: Callable[[int], None]
) -> Callable[[], None]:
    def job() -> None:
        perform(instruction)
        for buffer in instruction.frees:
            on_free(buffer)

    return job


def _check(instructions: Sequence[Instruction], lanes: Mapping[str, Lane]) -> None:
    """Refuses what could wait for ever: ids are positions, and dependencies point backwards only.

    Raises:
        ArtifactError: The phase breaks that, or names a lane that is not here.
    """
    for position, instruction in enumerate(instructions):
        if instruction.id != position or any(not 0 <= after < position for after in instruction.after):
            raise ArtifactError(
                f"instruction {instruction.id} at position {position} waits for {instruction.after}; "
                f"expected ids equal to positions and dependencies before them. Solve again"
            )
        if instruction.lane != COMPUTE and instruction.lane not in lanes:
            raise ArtifactError(
                f"instruction {position} is for lane {instruction.lane!r}; expected compute or one of "
                f"{', '.join(lanes)}. Solve again for this device"
            )
