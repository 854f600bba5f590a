from __future__ import annotations

import pytest
from msgspec import structs

from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import Instruction, Phase, Plan
from tests.solve.planning import check, lowered, owners
from tests.solve.synthetic import Block, Sketch, chain, placement


def step(plan: Plan) -> Phase:
    return plan.phases[0]


def compute(phase: Phase) -> list[str]:
    return [
        f"{item.operation} {item.parameter or item.region}"
        for item in phase.instructions
        if item.lane == "compute"
    ]


def transfers(plan: Plan, lane: str, role: str, owner: str) -> list[Instruction]:
    return [
        item
        for phase in plan.phases
        for item in phase.instructions
        if item.lane == lane and (role, owner) in owners(plan, [*item.reads, *item.writes])
    ]


def test_resident_step_is_forwards_backwards_and_updates_inside() -> None:
    plan = lowered(chain(2), placement(chain(2), chunk_elements=2**22))
    assert compute(step(plan)) == [
        "forward 0", "forward 1",
        "backward 1", "update w1", "update b1",
        "backward 0", "update w0", "update b0",
    ]  # fmt: skip
    assert [phase.name for phase in plan.phases] == ["step"]
    assert step(plan).successors == ["step"]


@pytest.mark.parametrize("gradients", ["keep", "move"])
def test_kept_gradients_are_updated_in_their_own_phase(gradients: str) -> None:
    sketch = chain(2, precision="fp16")
    plan = lowered(sketch, placement(sketch, gradients=gradients))
    check(sketch, plan)
    assert [phase.name for phase in plan.phases] == ["step", "update"]
    assert [phase.successors for phase in plan.phases] == [["update"], ["step"]]
    assert not any(name.startswith("update") for name in compute(step(plan)))


def test_fp16_refuses_the_update_inside_backward() -> None:
    sketch = chain(2, precision="fp16")
    with pytest.raises(ArtifactError, match="gradients are known"):
        lowered(sketch, placement(sketch, gradients="consume"))


def test_streamed_weights_are_read_for_forward_and_again_for_backward() -> None:
    sketch = chain(4)
    plan = lowered(sketch, placement(sketch, weights="streamed"))
    assert len(transfers(plan, "read", "weight", "w0")) == 2


def test_last_region_keeps_its_weights_from_forward_to_backward() -> None:
    sketch = chain(4)
    plan = lowered(sketch, placement(sketch, weights="streamed"))
    assert len(transfers(plan, "read", "weight", "w3")) == 1


def test_a_weight_streams_if_any_region_that_uses_it_does() -> None:
    sketch = chain(4, tied=True)
    choices = placement(sketch)
    choices.regions[0] = placement(sketch, weights="streamed").regions[0]
    plan = lowered(sketch, choices)
    check(sketch, plan)
    weight = next(item for item in plan.buffers if (item.role, item.owner) == ("weight", "w0"))
    assert not weight.resident
    assert weight.extent is not None


def test_fp32_weights_are_updated_in_place_and_written_once() -> None:
    sketch = chain(3)
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed"))
    assert len(transfers(plan, "write", "weight", "w0")) == 1
    assert not [item for item in plan.buffers if item.role == "master"]


def test_bf16_weights_are_written_in_pieces_without_being_read_for_it() -> None:
    sketch = chain(3, precision="bf16", weight=2**17 + 5)
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed", chunk_elements=2**16))
    written = transfers(plan, "write", "weight", "w0")
    pieces = [plan.buffers[item.reads[0].buffer] for item in written]
    assert [(piece.start, piece.count) for piece in pieces] == [(0, 2**16), (2**16, 2**16), (2**17, 5)]
    assert len(transfers(plan, "read", "weight", "w0")) == 2  # forward and backward


def test_optimizers_that_need_whole_parameters_are_not_chunked() -> None:
    sketch = chain(2, chunkable=False)
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed", chunk_elements=2**16))
    check(sketch, plan)
    updates = [item for item in step(plan).instructions if item.operation == "update"]
    assert {item.start for item in updates} == {0}


def test_tied_gradient_is_summed_and_updated_after_its_first_use() -> None:
    sketch = chain(3, tied=True)
    plan = lowered(sketch, placement(sketch, chunk_elements=2**22))
    names = compute(step(plan))
    assert names.count("update w0") == 1
    assert names.index("update w0") > names.index("backward 0")
    backward = [item for item in step(plan).instructions if item.operation == "backward"]
    versions = [
        access.version
        for item in backward
        for access in item.writes
        if (plan.buffers[access.buffer].role, plan.buffers[access.buffer].owner) == ("gradient", "w0")
    ]
    assert versions == [1, 2]


def test_a_weight_is_not_updated_before_a_backward_that_only_reads_it() -> None:
    sketch = chain(3)
    sketch.blocks[0].weights.append("w2")
    sketch.blocks[0].gradients = ["w0", "b0"]
    plan = lowered(sketch, placement(sketch, chunk_elements=2**22))
    check(sketch, plan)
    names = compute(step(plan))
    assert names.index("update w2") > names.index("backward 0")


def test_frozen_and_unused_weights_have_no_state_gradient_or_update() -> None:
    sketch = chain(3, precision="bf16", frozen=frozenset({"w1", "b1"}))
    sketch.weights["unused"] = 100
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed"))
    check(sketch, plan)
    roles = {item.role for item in plan.buffers if item.owner in ("w1", "b1", "unused")}
    assert roles == {"weight"}
    assert not transfers(plan, "write", "weight", "w1")
    assert not transfers(plan, "read", "weight", "unused")


def test_what_recomputes_drops_and_runs_again() -> None:
    sketch = chain(3)
    plan = lowered(sketch, placement(sketch, activations="recompute"))
    forwards = [item for item in step(plan).instructions if item.operation == "forward"]
    assert [item.mode for item in forwards] == ["drop"] * 3
    names = compute(step(plan))
    for region in range(3):
        assert names.index(f"recompute {region}") + 1 == names.index(f"backward {region}")


def test_moved_activations_leave_and_come_back_where_there_is_time() -> None:
    sketch = chain(4)
    plan = lowered(sketch, placement(sketch, activations="move"))
    assert len(transfers(plan, "write", "saved", "r0")) == 1
    assert len(transfers(plan, "read", "saved", "r0")) == 1
    # the last region's backward follows at once
    assert not transfers(plan, "write", "saved", "r3")


def test_moved_values_leave_between_forward_and_backward() -> None:
    sketch = chain(5)
    plan = lowered(sketch, placement(sketch, values="move"))
    check(sketch, plan)
    assert len(transfers(plan, "write", "value", "v0")) == 1
    assert len(transfers(plan, "read", "value", "v0")) == 1


def test_values_that_share_storage_do_not_move() -> None:
    sketch = chain(5, alias_sets={"v0": 3, "v1": 3})
    plan = lowered(sketch, placement(sketch, values="move"))
    assert not transfers(plan, "write", "value", "v0")
    assert transfers(plan, "write", "value", "v2")


def test_inputs_are_kept_until_backward_and_outputs_without_reader_are_not() -> None:
    blocks = [Block(["x"], ["v0"], ["w"]), Block(["v0"], ["loss", "logits"], ["u"])]
    sketch = Sketch(blocks, {"x": 10, "v0": 20, "loss": 1, "logits": 30}, {"w": 40, "u": 50})
    plan = lowered(sketch, placement(sketch))

    def freed_by(owner: str) -> str:
        item = next(
            item for item in step(plan).instructions
            if any((plan.buffers[b].role, plan.buffers[b].owner) == ("value", owner) for b in item.frees)
        )  # fmt: skip
        return f"{item.operation} {item.region}"

    assert freed_by("v0") == "backward 1"
    assert freed_by("logits") == "forward 1"


def test_regions_that_no_gradient_reaches_run_forward_only() -> None:
    blocks = [Block(["x"], ["mask"], []), Block(["x", "mask"], ["loss"], ["w"])]
    values = {"x": 10, "mask": 20, "loss": 1}
    sketch = Sketch(blocks, values, {"w": 40}, plain_values=frozenset({"mask"}))
    plan = lowered(sketch, placement(sketch))
    check(sketch, plan)
    assert "backward 0" not in compute(step(plan))


def test_evaluation_is_forward_only_and_ends_as_it_begins() -> None:
    sketch = chain(3, precision="bf16")
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed"), evaluates=True)
    check(sketch, plan)
    phase = plan.phases[-1]
    assert phase.name == "evaluate"
    assert {item.operation for item in phase.instructions} == {"evaluate", "read"}
    assert phase.successors == ["step", "evaluate"]


def test_prefetch_counts_regions_between_fetch_and_use() -> None:
    sketch = chain(6)
    plan = lowered(sketch, placement(sketch, weights="streamed", prefetch=2))
    order = {f"{item.operation} {item.region}": item.id for item in step(plan).instructions}
    fetch = transfers(plan, "read", "weight", "w4")[0]
    assert order["forward 1"] in fetch.after
    assert order["forward 2"] > fetch.id


def test_synchronous_fetch_waits_for_the_region_before() -> None:
    sketch = chain(6)
    plan = lowered(sketch, placement(sketch, weights="streamed", prefetch=0))
    order = {f"{item.operation} {item.region}": item.id for item in step(plan).instructions}
    assert order["forward 3"] in transfers(plan, "read", "weight", "w4")[0].after


def test_tight_layout_reuses_slots_and_verifies() -> None:
    sketch = chain(6, precision="bf16")
    choices = placement(sketch, weights="streamed", state="streamed", prefetch=1, chunk_slots=3)
    plan = lowered(sketch, choices, layout="tight")
    check(sketch, plan)
    offsets = [item.offset for item in plan.buffers if item.offset is not None]
    assert len(set(offsets)) < len(offsets) // 2


def test_odd_chunk_lengths_are_refused() -> None:
    sketch = chain(2)
    with pytest.raises(ArtifactError, match="multiple of 4096"):
        lowered(sketch, placement(sketch, chunk_elements=1000))
    odd = structs.replace(placement(sketch), resident_chunk_elements=1000)
    with pytest.raises(ArtifactError, match=r"resident_chunk_elements is 1000; .*multiple of 4096"):
        lowered(sketch, odd)


def updated_spans(plan: Plan, parameter: str) -> list[tuple[int, int]]:
    return [
        (item.start, item.count)
        for phase in plan.phases
        for item in phase.instructions
        if item.operation == "update" and item.parameter == parameter
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_stays_is_updated_in_long_chunks_and_what_moves_in_short_ones(precision: str) -> None:
    sketch = chain(3, precision=precision, weight=5 * 2**16)
    choices = structs.replace(placement(sketch, state="streamed"), resident_chunk_elements=2**18)
    choices.state["w0"] = "resident"
    choices.resident_elements["w2"] = 3 * 2**16
    plan = lowered(sketch, choices)
    check(sketch, plan)
    assert updated_spans(plan, "w0") == [(0, 2**18), (2**18, 2**16)]
    assert updated_spans(plan, "w1") == [(piece * 2**16, 2**16) for piece in range(5)]
    assert sorted(updated_spans(plan, "w2")) == [(0, 3 * 2**16), (3 * 2**16, 2**16), (4 * 2**16, 2**16)]


@pytest.mark.parametrize(
    ("precision", "weights", "gradients"),
    [("bf16", "streamed", "consume"), ("fp32", "streamed", "keep"), ("fp32", "resident", "move")],
)
def test_a_weight_or_gradient_that_comes_in_pieces_has_short_chunks(
    precision: str, weights: str, gradients: str
) -> None:
    sketch = chain(3, precision=precision, weight=2**18)
    choices = placement(sketch, weights=weights, gradients=gradients)
    plan = lowered(sketch, structs.replace(choices, resident_chunk_elements=2**18))
    check(sketch, plan)
    assert len(updated_spans(plan, "w1")) == 4


def test_every_dependency_points_backwards_and_to_another_lane() -> None:
    sketch = chain(5, precision="bf16", tied=True)
    plan = lowered(sketch, placement(sketch, weights="streamed", state="streamed", values="move", prefetch=1))
    for item in step(plan).instructions:
        for other in item.after:
            assert other < item.id
            assert step(plan).instructions[other].lane != item.lane
