"""Interprets a program with costs: how long a step takes, and the most memory it can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.artifacts.costs import LinkCost
from stages.artifacts.plan import ALIGNMENT, LANES, Buffer, Instruction, Phase, bookkeeping_bytes
from stages.artifacts.timeline import Event, Timeline
from stages.solve.lowering.lower import Program
from stages.solve.memory import Peak, dynamic_peak, stays_of
from stages.solve.problem import Problem, align

#: compute goes on at this share of its speed at least, whatever the links' shares add up to
_LEAST_RATE = 0.1


@dataclass(frozen=True)
class Simulation:
    """step_ns: phases "step" and, where there is one, "update"."""

    peak_bytes: int
    step_ns: int
    moved_bytes: dict[str, int]
    binding: str
    timeline: Timeline


@dataclass(frozen=True)
class _Active:
    """What runs at a moment."""

    compute: bool
    links: tuple[LinkCost, ...]

    @property
    def compute_rate(self) -> float:
        """Of compute's speed alone: each active link takes its share."""
        return max(_LEAST_RATE, 1 - sum(link.compute_slowdown_ppm for link in self.links) / 1e6)

    def bytes_per_ns(self, link: LinkCost) -> float:
        contended = len(self.links) > 1
        speed = link.contended_bytes_per_s if contended else link.bytes_per_s
        if self.compute:
            busy = link.busy_contended_bytes_per_s if contended else link.busy_bytes_per_s
            speed = busy or speed
        return max(1, speed) / 1e9


@dataclass
class _Transfer:
    """A transfer under way: first the latency, then bytes at a rate that may change."""

    link: LinkCost
    latency_ns: float
    bytes_left: float

    def remaining_ns(self, active: _Active) -> float:
        return self.latency_ns + self.bytes_left / active.bytes_per_ns(self.link)

    def advance(self, elapsed_ns: float, active: _Active) -> None:
        waited = min(self.latency_ns, elapsed_ns)
        self.latency_ns -= waited
        self.bytes_left = max(0.0, self.bytes_left - (elapsed_ns - waited) * active.bytes_per_ns(self.link))


@dataclass
class _Lane:
    queue: list[Instruction]
    position: int = 0
    started_ns: float = 0.0
    running: bool = False
    compute_left_ns: float = 0.0
    transfer: _Transfer | None = None

    @property
    def current(self) -> Instruction:
        return self.queue[self.position]

    def remaining_ns(self, active: _Active) -> float:
        if self.transfer is None:
            return self.compute_left_ns / active.compute_rate
        return self.transfer.remaining_ns(active)

    def advance(self, elapsed_ns: float, active: _Active) -> None:
        if self.transfer is None:
            self.compute_left_ns -= elapsed_ns * active.compute_rate
        else:
            self.transfer.advance(elapsed_ns, active)


def simulate(problem: Problem, program: Program, evaluation: Problem | None = None) -> Simulation:
    """Runs `program` on paper."""
    clock = 0.0
    events: list[Event] = []
    memory: list[tuple[int, int]] = []
    moved: dict[str, int] = {"read": 0, "write": 0}
    for phase in program.phases:
        if phase.name == "evaluate":
            continue
        spans = _run_phase(problem, program, phase)
        start_ns = clock
        for instruction, (start, end) in zip(phase.instructions, spans, strict=True):
            size = transfer_bytes(program.buffers, instruction)
            if size:
                _count_moved(problem, program.buffers, instruction, size, moved)
            if instruction.operation != "free":
                name = _name(problem, program.buffers, instruction)
                events.append(
                    Event(instruction.lane, name, round(start_ns + start), round(start_ns + end), size)
                )
            clock = max(clock, start_ns + end)
        memory += _memory_curve(problem, program, phase, spans, start_ns)
    peak, binding = _peak(problem, program, evaluation)
    timeline = Timeline("predicted", 0, events, memory)
    return Simulation(peak, round(clock), moved, binding, timeline)


def transfer_bytes(buffers: Sequence[Buffer], instruction: Instruction) -> int:
    """Bytes on the link: whole aligned blocks."""
    if instruction.lane == "compute":
        return 0
    return sum(align(buffers[access.buffer].bytes) for access in (*instruction.reads, *instruction.writes))


def _home(buffers: Sequence[Buffer], instruction: Instruction) -> str:
    return buffers[(instruction.reads or instruction.writes)[0].buffer].home


def _count_moved(
    problem: Problem, buffers: Sequence[Buffer], instruction: Instruction, size: int, moved: dict[str, int]
) -> None:
    moved[instruction.lane] += size
    if problem.host is not None and _home(buffers, instruction) == "disk":
        link = f"disk_{instruction.lane}"
        moved[link] = moved.get(link, 0) + size


def latency_ns(link: LinkCost, buffers: Sequence[Buffer], instruction: Instruction) -> float:
    """What a transfer takes beside its bytes at the link's bandwidth."""
    moved = [buffers[access.buffer] for access in (*instruction.reads, *instruction.writes)]
    scattered = sum(align(buffer.bytes) for buffer in moved if buffer.offset is None)
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


def _run_phase(problem: Problem, program: Program, phase: Phase) -> list[tuple[float, float]]:
    """Start and end of every instruction, in nanoseconds from the phase's start."""
    lanes = {name: _Lane([item for item in phase.instructions if item.lane == name]) for name in LANES}
    spans: list[tuple[float, float]] = [(0.0, 0.0)] * len(phase.instructions)
    finished = [False] * len(phase.instructions)
    now, left = 0.0, len(phase.instructions)
    while left:
        for lane in lanes.values():
            if not lane.running and lane.position < len(lane.queue):
                _start(problem, program, lane, finished, now)
        running = [lane for lane in lanes.values() if lane.running]
        links = tuple(lane.transfer.link for lane in running if lane.transfer is not None)
        active = _Active(lanes["compute"].running, links)
        elapsed = min(lane.remaining_ns(active) for lane in running)
        now += elapsed
        for lane in running:
            done = lane.remaining_ns(active) <= elapsed
            lane.advance(elapsed, active)
            if done:
                spans[lane.current.id] = (lane.started_ns, now)
                finished[lane.current.id] = True
                lane.running = False
                lane.position += 1
                left -= 1
    return spans


def _start(problem: Problem, program: Program, lane: _Lane, finished: list[bool], now: float) -> None:
    instruction = lane.current
    if not all(finished[other] for other in instruction.after):
        return
    lane.running, lane.started_ns, lane.transfer = True, now, None
    if instruction.lane == "compute":
        lane.compute_left_ns = compute_ns(problem, instruction)
        return
    link = problem.link(instruction.lane, _home(program.buffers, instruction))
    size = transfer_bytes(program.buffers, instruction)
    lane.transfer = _Transfer(link, latency_ns(link, program.buffers, instruction), float(size))


def _name(problem: Problem, buffers: Sequence[Buffer], instruction: Instruction) -> str:
    if instruction.operation == "update":
        return f"update {instruction.parameter}[{instruction.start}:{instruction.start + instruction.count}]"
    if instruction.lane == "compute":
        return f"{instruction.operation} {problem.regions[instruction.region].name}"
    access = (instruction.reads or instruction.writes)[0]
    buffer = buffers[access.buffer]
    part = f"[{buffer.start}:{buffer.start + buffer.count}]" if buffer.start else ""
    return f"{instruction.operation} {buffer.state or buffer.role} {buffer.owner}{part}"


def _memory_curve(
    problem: Problem,
    program: Program,
    phase: Phase,
    spans: list[tuple[float, float]],
    start_ns: float,
) -> list[tuple[int, int]]:
    """Bytes on the device over time, baseline and arena included."""
    changes: list[tuple[float, int]] = []
    for buffer, maker, freer in stays_of(phase):
        size = program.buffers[buffer].bytes
        if program.buffers[buffer].offset is None:
            changes.append((spans[maker][0] if maker >= 0 else 0.0, size))
            if freer is not None:
                changes.append((spans[freer][1], -size))
    for instruction in phase.instructions:
        if instruction.workspace_bytes:
            start, end = spans[instruction.id]
            changes += [(start, instruction.workspace_bytes), (end, -instruction.workspace_bytes)]
    held = fixed_bytes(problem, program)
    curve: list[tuple[int, int]] = []
    for moment, change in sorted(changes):
        held += change
        curve.append((round(start_ns + moment), held))
    return curve


def fixed_bytes(problem: Problem, program: Program) -> int:
    """What is held from the first step to the last: the process, the plan and the arena. Beside an
    accelerator the plan is in host memory."""
    if problem.host is not None:
        return problem.baseline_bytes + program.arena_bytes
    instructions = sum(len(phase.instructions) for phase in program.phases)
    plan = bookkeeping_bytes(instructions, len(program.buffers))
    return problem.baseline_bytes + plan + program.arena_bytes


def with_overhead(problem: Problem, size_bytes: int) -> int:
    """`size_bytes` of live tensors as the allocator holds them."""
    return size_bytes + -(-size_bytes * problem.allocator_overhead_ppm // 10**6)


def _peak(problem: Problem, program: Program, evaluation: Problem | None) -> tuple[int, str]:
    peaks = [(dynamic_peak(phase, program.buffers), phase) for phase in program.phases]
    peak, phase = max(peaks, key=lambda item: item[0].bytes)
    if problem.initial_bytes > peak.bytes:
        total = fixed_bytes(problem, program) + with_overhead(problem, problem.initial_bytes)
        return (
            total,
            f"making the largest initial value ({problem.initial_bytes} bytes), before the first step",
        )
    total = fixed_bytes(problem, program) + with_overhead(problem, peak.bytes)
    owner = evaluation if phase.name == "evaluate" and evaluation is not None else problem
    return total, _describe(owner, program, peak, phase)


def _describe(problem: Problem, program: Program, peak: Peak, phase: Phase) -> str:
    """The instruction and the buffers at the peak, readable."""
    instruction = phase.instructions[peak.instruction] if peak.instruction >= 0 else None
    name = "nothing" if instruction is None else instruction.operation
    if instruction is not None and instruction.operation != "free":
        name = _name(problem, program.buffers, instruction)
    parts = [f"{program.arena_bytes} bytes of planned buffers"]
    for buffer in peak.buffers[:3]:
        parts.append(
            f"{program.buffers[buffer].role} {program.buffers[buffer].owner} "
            f"({program.buffers[buffer].bytes} bytes)"
        )
    if instruction is not None and instruction.workspace_bytes:
        parts.append(f"{instruction.workspace_bytes} bytes of workspace")
    return f"phase {phase.name}, {name}: " + ", ".join(parts)
