"""Programs, not placements, are changed here: what lowering would never write must be refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stages.artifacts.plan import Access, Instruction, Phase, Plan
from stages.solve.errors import PlanError
from tests.solve.planning import check, lowered, with_instruction, with_phase, without_instruction
from tests.solve.strategies import sketches
from tests.solve.synthetic import Sketch, chain, placement

replace = msgspec.structs.replace
MUTATION = settings(
    max_examples=15, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> tuple[Sketch, Plan]:
    """A valid program with transfers of every kind."""
    sketch = draw(sketches())
    gradients = "move" if sketch.precision == "fp16" else draw(st.sampled_from(["consume", "move", "keep"]))
    choices = placement(
        sketch,
        weights=draw(st.sampled_from(["streamed", "streamed", "resident"])),
        state=draw(st.sampled_from(["streamed", "streamed", "resident"])),
        activations=draw(st.sampled_from(["keep", "recompute", "move"])),
        values=draw(st.sampled_from(["keep", "move"])),
        gradients=gradients,
        prefetch=draw(st.integers(0, 2)),
        chunk_slots=draw(st.integers(1, 3)),
    )
    layout = draw(st.sampled_from(["packed", "tight"]))
    plan = lowered(sketch, choices, layout=layout, evaluates=True)
    check(sketch, plan)
    return sketch, plan


def everything(plan: Plan, *operations: str) -> Iterator[tuple[Phase, Instruction]]:
    for phase in plan.phases:
        for item in phase.instructions:
            if not operations or item.operation in operations:
                yield phase, item


def refused(sketch: Sketch, plan: Plan) -> None:
    with pytest.raises(PlanError):
        check(sketch, plan)


def draw_one(data: st.DataObject, found: list):
    assume(found)
    return data.draw(st.sampled_from(found))


def reaches(phase: Phase, first: int, second: int) -> bool:
    """Whether `first` must end before `second` starts, by walking the graph backwards."""
    previous: dict[str, int] = {}
    edges: dict[int, list[int]] = {}
    for item in phase.instructions:
        edges[item.id] = [*item.after, *([previous[item.lane]] if item.lane in previous else [])]
        previous[item.lane] = item.id
    stack, seen = [second], set()
    while stack:
        for other in edges[stack.pop()]:
            if other == first:
                return True
            if other not in seen:
                seen.add(other)
                stack.append(other)
    return False


@MUTATION
@given(case=programs(), data=st.data())
def test_dropped_dependency_on_a_fetch(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    found = []
    for phase, item in everything(plan):
        for other in item.after:
            maker = phase.instructions[other]
            needed = {access.buffer for access in item.reads} & {access.buffer for access in maker.writes}
            if maker.lane == "read" and needed:
                found.append((phase, item, other))
    phase, item, other = draw_one(data, found)
    changed = replace(item, after=[identity for identity in item.after if identity != other])
    weaker = with_instruction(plan, phase, changed)
    weaker_phase = next(one for one in weaker.phases if one.name == phase.name)
    assume(not reaches(weaker_phase, other, item.id))
    refused(sketch, weaker)


@MUTATION
@given(case=programs(), data=st.data())
def test_dropped_dependency_of_a_write(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    found = [(phase, item) for phase, item in everything(plan, "write") if item.after]
    phase, item = draw_one(data, found)
    weaker = with_instruction(plan, phase, replace(item, after=[]))
    weaker_phase = next(one for one in weaker.phases if one.name == phase.name)
    assume(not all(reaches(weaker_phase, other, item.id) for other in item.after))
    refused(sketch, weaker)


@MUTATION
@given(case=programs(), data=st.data())
def test_fetch_into_a_slot_that_may_be_taken(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    found = []
    for phase, item in everything(plan, "read"):
        for other in item.after:
            mine = plan.buffers[item.writes[0].buffer]
            for freed in phase.instructions[other].frees:
                if _share_bytes(mine, plan.buffers[freed]) and freed != mine.id:
                    found.append((phase, item, other))
    phase, item, other = draw_one(data, found)
    changed = replace(item, after=[identity for identity in item.after if identity != other])
    weaker = with_instruction(plan, phase, changed)
    weaker_phase = next(one for one in weaker.phases if one.name == phase.name)
    assume(not reaches(weaker_phase, other, item.id))
    refused(sketch, weaker)


def _share_bytes(one, other) -> bool:
    if one.offset is None or other.offset is None:
        return False
    return one.offset < other.offset + other.bytes and other.offset < one.offset + one.bytes


@MUTATION
@given(case=programs(), data=st.data())
def test_swapped_fetches(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    # the first buffer is used before the second is fetched: in its place it comes too late
    found = [
        (phase, one, other)
        for phase in plan.phases
        for one in _reads(phase)
        for other in _reads(phase)
        if one.writes[0].buffer != other.writes[0].buffer and one.id < _first_use(phase, one) < other.id
    ]
    phase, one, other = draw_one(data, found)
    swapped = with_instruction(plan, phase, replace(one, writes=other.writes))
    phase = next(item for item in swapped.phases if item.name == phase.name)
    refused(sketch, with_instruction(swapped, phase, replace(other, writes=one.writes)))


def _first_use(phase: Phase, read: Instruction) -> int:
    """The first compute instruction that uses what `read` fetches."""
    return next(
        item.id
        for item in phase.instructions[read.id :]
        if item.lane == "compute" and read.writes[0].buffer in {access.buffer for access in item.reads}
    )


def _reads(phase: Phase) -> list[Instruction]:
    return [item for item in phase.instructions if item.operation == "read"]


@MUTATION
@given(case=programs(), data=st.data())
def test_slot_moved_onto_a_live_neighbour(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    planned = [item for item in plan.buffers if item.offset is not None and item.resident and item.bytes]
    assume(len(planned) > 1)
    victim, neighbour = data.draw(st.permutations(planned))[:2]
    buffers = [
        replace(item, offset=neighbour.offset) if item.id == victim.id else item for item in plan.buffers
    ]
    refused(sketch, replace(plan, buffers=buffers))


@MUTATION
@given(case=programs(), data=st.data())
def test_streamed_slot_moved_onto_a_resident_one(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    moved = {access.buffer for _, item in everything(plan, "read") for access in item.writes}
    victims = [item for item in plan.buffers if item.id in moved and item.offset is not None]
    residents = [item for item in plan.buffers if item.offset is not None and item.resident]
    victim, resident = draw_one(data, victims), draw_one(data, residents)
    buffers = [
        replace(item, offset=resident.offset) if item.id == victim.id else item for item in plan.buffers
    ]
    roomy = replace(plan, buffers=buffers, arena_bytes=plan.arena_bytes + 2 * victim.bytes)
    refused(sketch, roomy)


@MUTATION
@given(case=programs(), data=st.data())
def test_dropped_update(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase, item = draw_one(data, list(everything(plan, "update")))
    refused(sketch, without_instruction(plan, phase, item.id))


@MUTATION
@given(case=programs(), data=st.data())
def test_duplicated_update(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase, item = draw_one(data, list(everything(plan, "update")))
    bumped = [Access(access.buffer, access.version + 1) for access in item.writes]
    twin = replace(item, id=len(phase.instructions), after=[], writes=bumped, frees=[])
    refused(sketch, with_phase(plan, replace(phase, instructions=[*phase.instructions, twin])))


@MUTATION
@given(case=programs(), data=st.data())
def test_shortened_update(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase, item = draw_one(data, [found for found in everything(plan, "update") if found[1].count > 1])
    refused(sketch, with_instruction(plan, phase, replace(item, count=item.count - 1)))


@MUTATION
@given(case=programs(), data=st.data())
def test_early_free(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    found = []
    for phase, item in everything(plan):
        for buffer in item.frees:
            users = [
                other.id
                for other in phase.instructions[: item.id]
                if other.lane == "compute" and buffer in {access.buffer for access in other.reads}
            ]
            found += [(phase, item, buffer, user) for user in users]
    phase, item, buffer, user = draw_one(data, found)
    earlier = [other.id for other in phase.instructions[:user] if other.lane == "compute"]
    assume(earlier)
    target = phase.instructions[data.draw(st.sampled_from(earlier))]
    changed = with_instruction(
        plan, phase, replace(item, frees=[other for other in item.frees if other != buffer])
    )
    phase = next(one for one in changed.phases if one.name == phase.name)
    refused(sketch, with_instruction(changed, phase, replace(target, frees=[*target.frees, buffer])))


@MUTATION
@given(case=programs(), data=st.data())
def test_forgotten_free(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    """What ends only once is still there at the exit; what comes back may as well stay, if there is room."""
    sketch, plan = case
    ends = {
        phase.name: Counter(buffer for item in phase.instructions for buffer in item.frees)
        for phase in plan.phases
    }
    found = [
        (phase, item)
        for phase, item in everything(plan)
        if item.frees and ends[phase.name][item.frees[0]] == 1
    ]
    phase, item = draw_one(data, found)
    refused(sketch, with_instruction(plan, phase, replace(item, frees=item.frees[1:])))


@MUTATION
@given(case=programs(), data=st.data())
def test_dropped_instruction(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase, item = draw_one(data, list(everything(plan)))
    refused(sketch, without_instruction(plan, phase, item.id))


@MUTATION
@given(case=programs(), data=st.data())
def test_forgotten_read_of_a_gradient_state_or_input(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    working = ("forward", "backward", "update", "evaluate", "recompute")
    found = [(phase, item, access) for phase, item in everything(plan, *working) for access in item.reads]
    phase, item, access = draw_one(data, found)
    fewer = [other for other in item.reads if other != access]
    refused(sketch, with_instruction(plan, phase, replace(item, reads=fewer)))


@MUTATION
@given(case=programs(), data=st.data())
def test_changed_version(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase, item = draw_one(data, [found for found in everything(plan) if found[1].reads])
    access = data.draw(st.sampled_from(item.reads))
    changed = [Access(a.buffer, a.version + 1) if a == access else a for a in item.reads]
    refused(sketch, with_instruction(plan, phase, replace(item, reads=changed)))


def streamed(precision: str = "bf16") -> tuple[Sketch, Plan]:
    sketch = chain(4, precision=precision, tied=True)
    choices = placement(
        sketch, weights="streamed", state="streamed", prefetch=1, chunk_slots=2,
        gradients="move" if precision == "fp16" else "consume",
    )  # fmt: skip
    return sketch, lowered(sketch, choices, evaluates=True)


def test_budget_one_byte_too_small() -> None:
    sketch, plan = streamed()
    check(sketch, plan)
    with pytest.raises(PlanError, match="bytes may be held"):
        check(sketch, replace(plan, budget_bytes=plan.budget_bytes - 1))


def test_understated_workspace() -> None:
    sketch, plan = streamed()
    phase, item = next(found for found in everything(plan, "backward") if found[1].workspace_bytes)
    with pytest.raises(PlanError, match="measured peak"):
        check(sketch, with_instruction(plan, phase, replace(item, workspace_bytes=0)))


def test_understated_buffer() -> None:
    sketch, plan = streamed()
    buffers = [replace(item, bytes=1) if item.role == "gradient" else item for item in plan.buffers]
    with pytest.raises(PlanError, match="expected"):
        check(sketch, replace(plan, buffers=buffers))


def test_dependency_on_a_later_instruction() -> None:
    sketch, plan = streamed()
    phase = plan.phases[0]
    with pytest.raises(PlanError, match="earlier instruction"):
        check(sketch, with_instruction(plan, phase, replace(phase.instructions[0], after=[3])))


def test_backward_in_evaluation() -> None:
    sketch, plan = streamed()
    phase = plan.phases[-1]
    item = next(item for item in phase.instructions if item.operation == "evaluate")
    with pytest.raises(PlanError, match="no place here"):
        check(sketch, with_instruction(plan, phase, replace(item, operation="backward")))


def test_update_inside_backward_under_fp16() -> None:
    sketch, plan = streamed("fp16")
    half, merged = streamed("bf16")
    with pytest.raises(PlanError):
        check(sketch, replace(merged, precision="fp16"))
    check(half, merged)
    check(sketch, plan)


def test_exit_that_differs_from_the_entry_of_its_successor() -> None:
    sketch, plan = streamed()
    phase = plan.phases[0]
    moved = [item for item in phase.entry if item.tier == "disk"][1:]
    entry = [item for item in phase.entry if item.tier == "device"] + moved
    with pytest.raises(PlanError):
        check(sketch, with_phase(plan, replace(phase, entry=entry)))


def test_two_tensors_on_the_same_disk_blocks() -> None:
    sketch, plan = streamed()
    homes = [item for item in plan.buffers if item.extent is not None and item.role == "state"]
    buffers = [
        replace(item, extent=homes[0].extent) if item.id == homes[-1].id else item for item in plan.buffers
    ]
    with pytest.raises(PlanError, match="share bytes on disk"):
        check(sketch, replace(plan, buffers=buffers))


def test_disk_budget() -> None:
    from stages.solve.verifier import verify

    sketch, plan = streamed()
    evaluation = (sketch.graph(), sketch.costs())
    verify(plan, *evaluation, evaluation=evaluation, disk_budget_bytes=plan.disk_bytes)
    with pytest.raises(PlanError, match="disk_budget"):
        verify(plan, *evaluation, evaluation=evaluation, disk_budget_bytes=plan.disk_bytes - 1)


def test_slow_transfers_count_in_the_peak() -> None:
    """A moved value that no later instruction waits for may stay for the whole phase."""
    sketch = chain(6)
    plan = lowered(sketch, placement(sketch, values="move", activations="move"))
    phase = plan.phases[0]
    frees = [item for item in phase.instructions if item.operation == "free"]
    assert frees
    lazy = plan
    for item in frees:
        phase = next(one for one in lazy.phases if one.name == "step")
        lazy = with_instruction(lazy, phase, replace(item, after=[]))
    refused(sketch, lazy)
