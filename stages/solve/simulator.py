"""Interprets a program with costs: how long a step takes, and the most memory it can hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from stages.artifacts.plan import Buffer, Instruction, Phase, bookkeeping_bytes
from stages.artifacts.timeline import Event, Timeline
from stages.solve.clock import Span, home_of, run_phase, transfer_bytes
from stages.solve.lowering.lower import Program
from stages.solve.memory import Peak, dynamic_peak, stays_of
from stages.solve.problem import Problem


@dataclass(frozen=True)
class Simulation:
    """step_ns: phases "step", "accumulate" as often as a step has further batches, and "update", where the
    program has them. What only the plan that is chosen is asked for is worked out then."""

    peak_bytes: int
    step_ns: int
    binding: str
    _problem: Problem
    _program: Program
    _spans: dict[str, list[Span]]  # by phase, from the phase's start

    @cached_property
    def moved_bytes(self) -> dict[str, int]:
        """Lane -> bytes; beside an accelerator also those of the disk's part of each link."""
        moved: dict[str, int] = {"read": 0, "write": 0}
        for phase in self._phases:
            times = repetitions(self._problem, phase.name)
            for instruction in phase.instructions:
                size = times * transfer_bytes(self._program.buffers, instruction)
                if size:
                    _count_moved(self._problem, self._program.buffers, instruction, size, moved)
        return moved

    @cached_property
    def timeline(self) -> Timeline:
        events: list[Event] = []
        memory: list[tuple[int, int]] = []
        start_ns = 0.0
        for phase in [item for item in self._phases for _ in range(repetitions(self._problem, item.name))]:
            spans = self._spans[phase.name]
            events += _events(self._problem, self._program, phase, spans, start_ns)
            memory += _memory_curve(self._problem, self._program, phase, spans, start_ns)
            start_ns += _length(spans)
        return Timeline("predicted", 0, events, memory)

    @property
    def _phases(self) -> list[Phase]:
        return [phase for phase in self._program.phases if phase.name in self._spans]


def simulate(problem: Problem, program: Program, evaluation: Problem | None = None) -> Simulation:
    """Runs `program` on paper."""
    spans = {
        phase.name: run_phase(problem, program.buffers, phase)
        for phase in program.phases
        if phase.name != "evaluate"
    }
    peak, binding = _peak(problem, program, evaluation)
    step_ns = sum(repetitions(problem, name) * _length(times) for name, times in spans.items())
    return Simulation(peak, round(step_ns), binding, problem, program, spans)


def repetitions(problem: Problem, phase: str) -> int:
    """How often a step goes through a phase."""
    return problem.accumulate - 1 if phase == "accumulate" else 1


def _length(spans: list[Span]) -> float:
    return max((end for _, end in spans), default=0.0)


def _events(
    problem: Problem, program: Program, phase: Phase, spans: list[Span], start_ns: float
) -> Iterator[Event]:
    for instruction, (start, end) in zip(phase.instructions, spans, strict=True):
        if instruction.operation != "free":
            name = _name(problem, program.buffers, instruction)
            size = transfer_bytes(program.buffers, instruction)
            yield Event(instruction.lane, name, round(start_ns + start), round(start_ns + end), size)


def _count_moved(
    problem: Problem, buffers: Sequence[Buffer], instruction: Instruction, size: int, moved: dict[str, int]
) -> None:
    moved[instruction.lane] += size
    if problem.host is not None and home_of(buffers, instruction) == "disk":
        link = f"disk_{instruction.lane}"
        moved[link] = moved.get(link, 0) + size


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
    spans: list[Span],
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


def _peak(problem: Problem, program: Program, evaluation: Problem | None) -> tuple[int, str]:
    peaks = [(dynamic_peak(phase, program.buffers), phase) for phase in program.phases]
    peak, phase = max(peaks, key=lambda item: item[0].bytes)
    if problem.initial_bytes > peak.bytes:
        total = fixed_bytes(problem, program) + problem.as_allocated(problem.initial_bytes)
        return (
            total,
            f"making the largest initial value ({problem.initial_bytes} bytes), before the first step",
        )
    total = fixed_bytes(problem, program) + problem.as_allocated(peak.bytes)
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
