"""Lanes: order, dependencies, failures, and the adversarial kind that runs things late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import Instruction
from stages.runtime.lanes.adversarial import poison
from stages.runtime.lanes.lane_set import LaneSet

KINDS = ("cpu", "adversarial")


def instruction(
    identity: int, lane: str, after: list[int] | None = None, frees: list[int] | None = None
) -> Instruction:
    operation = "forward" if lane == "compute" else lane
    return Instruction(id=identity, lane=lane, operation=operation, after=after or [], frees=frees or [])


def record(
    phase: list[Instruction], kind: str, before: Callable[[Instruction], None] | None = None
) -> list[str]:
    """Runs a phase and returns what happened: "3" for an instruction's end, "free 7" for a buffer's."""
    seen: list[str] = []

    def perform(instruction: Instruction) -> None:
        if before is not None:
            before(instruction)
        seen.append(str(instruction.id))

    with LaneSet.of_kind(kind) as lanes:
        lanes.run(phase, perform, lambda buffer: seen.append(f"free {buffer}"))
    return seen


@st.composite
def phases(draw: st.DrawFn) -> list[Instruction]:
    count = draw(st.integers(1, 14))
    lanes = [draw(st.sampled_from(["compute", "read", "write"])) for _ in range(count)]
    phase = []
    for identity, lane in enumerate(lanes):
        earlier = st.sets(st.integers(0, identity - 1), max_size=3) if identity else st.just(set[int]())
        phase.append(instruction(identity, lane, sorted(draw(earlier))))
    return phase


@pytest.mark.parametrize("kind", KINDS)
@given(phase=phases())
@settings(max_examples=40, deadline=None)
def test_every_instruction_runs_once_after_its_dependencies_and_predecessors(
    kind: str, phase: list[Instruction]
) -> None:
    seen = record(phase, kind)
    assert sorted(seen, key=int) == [str(item.id) for item in phase]
    place = {int(name): position for position, name in enumerate(seen)}
    for item in phase:
        assert all(place[after] < place[item.id] for after in item.after)
        assert all(place[other.id] < place[item.id] for other in phase[: item.id] if other.lane == item.lane)


@given(phase=phases())
@settings(max_examples=40, deadline=None)
def test_the_adversarial_lane_runs_nothing_before_somebody_needs_it(phase: list[Instruction]) -> None:
    seen = [int(name) for name in record(phase, "adversarial")]
    needed: set[int] = set()
    for position, identity in enumerate(seen):
        item = phase[identity]
        later_compute = [phase[other] for other in seen[position:] if phase[other].lane == "compute"]
        if item.lane == "compute" or not later_compute:
            continue
        needed = _closure(phase, later_compute[0])
        assert identity in needed, f"{identity} ran before {later_compute[0].id}, which does not need it"


def _closure(phase: list[Instruction], item: Instruction) -> set[int]:
    """Everything that must have run before `item`, its lanes' queues included."""
    found: set[int] = set()
    waiting = list(item.after)
    while waiting:
        identity = waiting.pop()
        if identity not in found:
            found.add(identity)
            waiting.extend(phase[identity].after)
            waiting.extend(other.id for other in phase[:identity] if other.lane == phase[identity].lane)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_are_freed_before_anything_that_waits_starts(kind: str) -> None:
    phase = [
        instruction(0, "read"),
        instruction(1, "compute", [0], frees=[7]),
        instruction(2, "write", [1], frees=[8, 9]),
        instruction(3, "compute", [2]),
    ]
    assert record(phase, kind) == ["0", "1", "free 7", "2", "free 8", "free 9", "3"]


def test_a_transfer_overlaps_compute_that_does_not_need_it() -> None:
    """Each side waits for the other to have started, which only ends if they run at once."""
    both = threading.Barrier(2, timeout=30)
    phase = [instruction(0, "read"), instruction(1, "compute"), instruction(2, "compute", [0])]
    record(phase, "cpu", before=lambda item: both.wait() if item.id < 2 else None)


def test_timings_lie_inside_the_run_and_respect_dependencies() -> None:
    phase = [instruction(0, "read"), instruction(1, "compute", [0]), instruction(2, "write", [1])]
    start = time.perf_counter_ns()
    with LaneSet.of_kind("cpu") as lanes:
        timings = lanes.run(phase, lambda item: time.sleep(0.001), lambda buffer: None)
    end = time.perf_counter_ns()
    assert [timing.lane for timing in timings] == ["read", "compute", "write"]
    moments = [moment for timing in timings for moment in (timing.start_ns, timing.end_ns)]
    assert [start, *moments, end] == sorted([start, *moments, end])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", range(4))
def test_a_failure_in_any_lane_reaches_the_caller_and_stops_the_rest(kind: str, broken: int) -> None:
    phase = [
        instruction(0, "read"),
        instruction(1, "compute", [0]),
        instruction(2, "write", [1]),
        instruction(3, "read", [2]),
        instruction(4, "compute", [3]),
        instruction(5, "write", [4]),
    ]
    seen: list[int] = []

    def perform(item: Instruction) -> None:
        if item.id == broken:
            raise OSError(5, "Input/output error")
        seen.append(item.id)

    with LaneSet.of_kind(kind) as lanes:
        with pytest.raises(OSError, match="Input/output"):
            lanes.run(phase, perform, lambda buffer: None)
        assert seen == list(range(broken))
        seen.clear()
        broken = -1
        lanes.run(phase, perform, lambda buffer: None)  # the lanes are as good as new
        assert seen == list(range(6))


def test_a_failed_transfer_stops_compute_that_does_not_wait_for_it() -> None:
    failed = threading.Event()
    phase = [instruction(0, "read"), instruction(1, "compute"), instruction(2, "compute")]
    seen: list[int] = []

    def perform(item: Instruction) -> None:
        if item.lane == "read":
            failed.set()
            raise OSError(5, "Input/output error")
        failed.wait(timeout=30)
        time.sleep(0.05)  # the lane's thread still has to report what it raised
        seen.append(item.id)

    with LaneSet.of_kind("cpu") as lanes, pytest.raises(OSError, match="Input/output"):
        lanes.run(phase, perform, lambda buffer: None)
    assert seen == [1]


def test_an_interrupt_in_compute_lets_running_transfers_end_and_drops_the_rest() -> None:
    started = threading.Event()
    finished: list[int] = []

    def perform(item: Instruction) -> None:
        if item.lane == "compute":
            started.wait(timeout=30)
            raise KeyboardInterrupt
        started.set()
        time.sleep(0.05)
        finished.append(item.id)

    phase = [instruction(0, "read"), instruction(1, "compute"), instruction(2, "read", [1])]
    with LaneSet.of_kind("cpu") as lanes:
        with pytest.raises(KeyboardInterrupt):
            lanes.run(phase, perform, lambda buffer: None)
        assert finished == [0]


def test_no_thread_is_left_after_close_even_after_a_failure() -> None:
    def perform(item: Instruction) -> None:
        raise RuntimeError("broken")

    before = threading.active_count()
    for _ in range(3):
        lanes = LaneSet.of_kind("cpu")
        assert threading.active_count() == before + 2
        with pytest.raises(RuntimeError):
            lanes.run([instruction(0, "write"), instruction(1, "read")], perform, lambda buffer: None)
        lanes.close()
        lanes.close()
        assert threading.active_count() == before


def test_lanes_hold_nothing_of_a_phase_that_has_ended() -> None:
    class Payload:
        pass

    import weakref

    payload = Payload()
    gone = weakref.ref(payload)
    with LaneSet.of_kind("cpu") as lanes:
        held = [payload]
        lanes.run([instruction(0, "read")], lambda item: held[0] and None, lambda buffer: None)
        held.clear()
        del payload
        assert gone() is None


@pytest.mark.parametrize(
    "phase",
    [
        [instruction(1, "compute")],
        [instruction(0, "compute", [0])],
        [instruction(0, "read", [1]), instruction(1, "compute")],
        [instruction(0, "compute", [-1])],
        [instruction(0, "upload")],
    ],
    ids=["id", "itself", "forward", "negative", "lane"],
)
def test_a_phase_that_could_wait_for_ever_is_refused(phase: list[Instruction]) -> None:
    with LaneSet.of_kind("cpu") as lanes, pytest.raises(ArtifactError, match="Solve again"):
        lanes.run(phase, lambda item: None, lambda buffer: None)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="cpu or adversarial"):
        LaneSet.of_kind("gpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64])
def test_poisoned_floats_are_nan(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    poison(tensor)
    assert bool(torch.isnan(tensor).all())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_poisoned_integers_are_out_of_range_of_any_index(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    poison(tensor)
    assert bool((tensor == torch.iinfo(dtype).max).all())


def test_poisoned_booleans_are_inverted() -> None:
    tensor = torch.tensor([True, False])
    poison(tensor)
    assert tensor.tolist() == [False, True]


def test_a_weight_that_requires_grad_can_be_poisoned() -> None:
    weight = torch.ones(3, requires_grad=True)
    poison(weight)
    assert bool(torch.isnan(weight).all())
