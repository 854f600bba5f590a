"""When each instruction of a phase starts and ends: lanes that share links and slow one another down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.artifacts.costs import LinkCost
from stages.artifacts.plan import ALIGNMENT, LANES, Buffer, Instruction, Phase
from stages.solve.errors import PlanError
from stages.solve.problem import Problem, align

#: compute goes on at this share of its speed at least, whatever the links' shares add up to
_LEAST_RATE = 0.1

#: start and end in nanoseconds
Span = tuple[float, float]


def transfer_bytes(buffers: Sequence[Buffer], instruction: Instruction) -> int:
    """Bytes on the link: whole aligned blocks."""
    if instruction.lane == "compute":
        return 0
    return sum([align(buffers[access.buffer].bytes) for access in (*instruction.reads, *instruction.writes)])


def home_of(buffers: Sequence[Buffer], instruction: Instruction) -> str:
    """Where a transfer's buffer lives beyond the device."""
    return buffers[(instruction.reads or instruction.writes)[0].buffer].home


def latency_ns(link: LinkCost, buffers: Sequence[Buffer], instruction: Instruction) -> float:
    """What a transfer takes beside its bytes at the link's bandwidth."""
    moved = [buffers[access.buffer] for access in (*instruction.reads, *instruction.writes)]
    scattered = sum([align(buffer.bytes) for buffer in moved if buffer.offset is None])
    return float(link.latency_ns + scattered // ALIGNMENT * link.scattered_block_ns)


def compute_ns(problem: Problem, instruction: Instruction) -> float:
    """Duration of a compute instruction."""
    if instruction.operation == "update":
        optimizer = problem.optimizer
        return optimizer.latency_ns + instruction.count * 1e9 / max(1, optimizer.elements_per_s)
    if instruction.operation == "free":
        return 0.0
    cost = problem.regions[instruction.region].cost
    return float(cost.backward_ns if instruction.operation == "backward" else cost.forward_ns)


@dataclass(frozen=True)
class Speeds:
    """What goes on at a moment: compute's share of its speed alone, and bytes per nanosecond of each link."""

    compute: float
    read: float
    write: float

    @staticmethod
    def of(computing: bool, read: LinkCost | None, write: LinkCost | None) -> Speeds:
        """read, write: the links in use. Each takes its share of compute's speed."""
        links = [link for link in (read, write) if link is not None]
        slowdown = sum([link.compute_slowdown_ppm for link in links]) / 1e6

        def speed(link: LinkCost | None) -> float:
            if link is None:
                return 1.0
            alone = link.contended_bytes_per_s if len(links) > 1 else link.bytes_per_s
            if computing:
                busy = link.busy_contended_bytes_per_s if len(links) > 1 else link.busy_bytes_per_s
                alone = busy or alone
            return max(1, alone) / 1e9

        return Speeds(max(_LEAST_RATE, 1 - slowdown), speed(read), speed(write))


class _Lane:
    """A queue of instructions. The first of them that has started has a latency left, then work: nanoseconds
    of compute, or bytes at a speed that may change."""

    __slots__ = ("latency_ns", "left", "link", "position", "queue", "running", "started_ns")

    def __init__(self, queue: list[Instruction]) -> None:
        self.queue = queue
        self.position = 0
        self.running = False
        self.started_ns = self.latency_ns = self.left = 0.0
        self.link: LinkCost | None = None

    def advance(self, elapsed_ns: float, speed: float) -> None:
        waited = self.latency_ns if self.latency_ns < elapsed_ns else elapsed_ns
        self.latency_ns -= waited
        self.left = max(0.0, self.left - (elapsed_ns - waited) * speed)


def run_phase(problem: Problem, buffers: Sequence[Buffer], phase: Phase) -> list[Span]:
    """Start and end of every instruction, in nanoseconds from the phase's start.

    Raises:
        PlanError: Instructions wait for one another.
    """
    lanes = [_Lane([item for item in phase.instructions if item.lane == name]) for name in LANES]
    compute, read, write = lanes
    spans: list[Span] = [(0.0, 0.0)] * len(phase.instructions)
    finished = bytearray(len(phase.instructions))
    known: dict[tuple[bool, int, int], Speeds] = {}
    now, left = 0.0, len(phase.instructions)
    while left:
        for lane in lanes:
            if not lane.running and lane.position < len(lane.queue):
                _start(problem, buffers, lane, finished, now)
        reading = read.link if read.running else None
        writing = write.link if write.running else None
        key = (compute.running, id(reading), id(writing))
        speeds = known.get(key)
        if speeds is None:
            speeds = known[key] = Speeds.of(compute.running, reading, writing)
        active = []
        elapsed = float("inf")
        for lane, speed in ((compute, speeds.compute), (read, speeds.read), (write, speeds.write)):
            if lane.running:
                remaining = lane.latency_ns + lane.left / speed
                active.append((lane, speed, remaining))
                elapsed = remaining if remaining < elapsed else elapsed
        if not active:
            raise PlanError(f"phase {phase.name}: its {left} last instructions wait for one another")
        now += elapsed
        for lane, speed, remaining in active:
            if remaining > elapsed:
                lane.advance(elapsed, speed)
                continue
            identity = lane.queue[lane.position].id
            spans[identity] = (lane.started_ns, now)
            finished[identity] = True
            lane.running = False
            lane.position += 1
            left -= 1
    return spans


def _start(problem: Problem, buffers: Sequence[Buffer], lane: _Lane, finished: bytearray, now: float) -> None:
    instruction = lane.queue[lane.position]
    for other in instruction.after:
        if not finished[other]:
            return
    lane.running, lane.started_ns = True, now
    if instruction.lane == "compute":
        lane.latency_ns, lane.left = 0.0, compute_ns(problem, instruction)
        return
    lane.link = link = problem.link(instruction.lane, home_of(buffers, instruction))
    lane.latency_ns = latency_ns(link, buffers, instruction)
    lane.left = float(transfer_bytes(buffers, instruction))
