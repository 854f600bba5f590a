"""Programs with several micro-batches: what lowering writes verifies, what is altered is refused."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from stages.artifacts.costs import Costs, SliceCosts
from stages.artifacts.errors import ArtifactError, ConfigError, InfeasibleBudgetError
from stages.artifacts.graph import RegionGraph, TensorSpec, Value
from stages.artifacts.plan import Instruction, Phase, Plan
from stages.artifacts.slicing import ORDERS, graph_of_slice, rows_of_slices
from stages.config import DataConfig, RunConfig, SolverConfig, TrainConfig
from stages.solve import stage
from stages.solve.build import build_problem
from stages.solve.choice import everything_resident, to_placement
from stages.solve.errors import PlanError
from stages.solve.estimate import Estimator
from stages.solve.least_budget import most_frugal
from stages.solve.lowering.lower import lower
from stages.solve.simulator import simulate
from tests.solve.planning import check, costs_for, lowered, with_instruction, with_phase
from tests.solve.strategies import sketches
from tests.solve.synthetic import Sketch, chain, placement

replace = msgspec.structs.replace
PROPERTY = settings(
    max_examples=15, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> tuple[Sketch, Plan]:
    sketch = draw(sketches())
    for block in sketch.blocks:
        block.mutates = []  # running statistics are refused
    gradients = "move" if sketch.precision == "fp16" else draw(st.sampled_from(["consume", "move", "keep"]))
    choices = placement(
        sketch,
        weights=draw(st.sampled_from(["streamed", "resident"])),
        state=draw(st.sampled_from(["streamed", "resident"])),
        activations=draw(st.sampled_from(["keep", "recompute", "move"])),
        values=draw(st.sampled_from(["keep", "move"])),
        gradients=gradients,
        prefetch=draw(st.integers(0, 2)),
        chunk_slots=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(2, 4)),
        order=draw(st.sampled_from(ORDERS)),
    )
    plan = lowered(sketch, choices, layout=draw(st.sampled_from(["packed", "tight"])), evaluates=True)
    return sketch, plan


def step_of(plan: Plan) -> Phase:
    return next(phase for phase in plan.phases if phase.name == "step")


def turns(plan: Plan, *operations: str) -> list[Instruction]:
    return [item for item in step_of(plan).instructions if item.operation in operations]


def refused(sketch: Sketch, plan: Plan) -> None:
    with pytest.raises(PlanError):
        check(sketch, plan)


@PROPERTY
@given(case=programs())
def test_what_lowering_writes_is_verified(case: tuple[Sketch, Plan]) -> None:
    check(*case)


@PROPERTY
@given(case=programs(), data=st.data())
def test_a_turn_given_to_another_micro_batch(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    item = data.draw(st.sampled_from(turns(plan, "forward", "backward", "recompute")))
    others = [batch for batch in range(-1, plan.placement.micro_batches + 1) if batch != item.micro_batch]
    changed = replace(item, micro_batch=data.draw(st.sampled_from(others)))
    refused(sketch, with_instruction(plan, step_of(plan), changed))


@PROPERTY
@given(case=programs(), data=st.data())
def test_an_access_to_the_buffer_of_another_micro_batch(
    case: tuple[Sketch, Plan], data: st.DataObject
) -> None:
    sketch, plan = case
    item = data.draw(st.sampled_from(turns(plan, "forward", "backward", "recompute")))
    own = [access for access in item.reads if _twins(plan, access.buffer)]
    assume(own)
    access = data.draw(st.sampled_from(own))
    other = replace(access, buffer=data.draw(st.sampled_from(_twins(plan, access.buffer))))
    reads = [other if read == access else read for read in item.reads]
    refused(sketch, with_instruction(plan, step_of(plan), replace(item, reads=reads)))


def _twins(plan: Plan, buffer: int) -> list[int]:
    """The same of other micro-batches."""
    record = plan.buffers[buffer]
    if record.role not in ("value", "value_gradient", "saved") or record.resident:
        return []
    return [
        other.id
        for other in plan.buffers
        if (other.role, other.owner, other.dtype) == (record.role, record.owner, record.dtype)
        and other.micro_batch != record.micro_batch
    ]


@PROPERTY
@given(case=programs(), data=st.data())
def test_an_update_before_the_last_micro_batch(case: tuple[Sketch, Plan], data: st.DataObject) -> None:
    sketch, plan = case
    phase = step_of(plan)
    updates = turns(plan, "update")
    assume(updates)
    update = updates[0]
    backward = [item for item in turns(plan, "backward") if item.id < update.id]
    early = [item for item in backward if item.micro_batch < plan.placement.micro_batches - 1]
    assume(early and backward)
    dropped = data.draw(st.sampled_from([item for item in backward if item.micro_batch]))
    # the backward becomes an instruction that does nothing
    idle = replace(dropped, operation="free", reads=[], writes=[], frees=[])
    refused(sketch, with_instruction(plan, phase, idle))


def test_the_sum_of_gradients_is_read_and_written_by_each_micro_batch() -> None:
    sketch = chain(3)
    plan = lowered(sketch, placement(sketch, micro_batches=3), evaluates=True)
    gradient = next(buffer.id for buffer in plan.buffers if (buffer.role, buffer.owner) == ("gradient", "w1"))
    last = [item for item in turns(plan, "backward") if item.region == 1][-1]
    assert [access.version for access in last.writes if access.buffer == gradient] == [3]
    forgotten = replace(last, reads=[access for access in last.reads if access.buffer != gradient])
    refused(sketch, with_instruction(plan, step_of(plan), forgotten))


def test_gradients_are_added_in_the_order_of_micro_batches() -> None:
    sketch = chain(3)
    plan = lowered(sketch, placement(sketch, micro_batches=2), evaluates=True)
    phase = step_of(plan)
    first, second = [item.id for item in turns(plan, "backward") if item.region == 0]
    instructions = list(phase.instructions)
    for here, batch in ((first, 1), (second, 0)):
        instructions[here] = replace(instructions[here], micro_batch=batch)
    refused(sketch, with_phase(plan, replace(phase, instructions=instructions)))


def test_a_loss_that_cannot_be_put_together_is_refused() -> None:
    sketch = chain(3)
    plan = lowered(sketch, placement(sketch, micro_batches=2), evaluates=True)
    refused(sketch, replace(plan, loss="sum"))
    refused(sketch, replace(plan, loss=""))


def test_running_statistics_are_refused() -> None:
    sketch = chain(3)
    sketch.buffers["running"] = 64
    sketch.blocks[1].weights.append("running")
    sketch.blocks[1].mutates.append("running")
    refused(sketch, lowered(sketch, placement(sketch, micro_batches=2), evaluates=True))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_streamed_weight_is_read_once_per_direction_whatever_the_number(micro_batches: int) -> None:
    sketch = chain(5)
    reads = {}
    for order in ORDERS:
        choices = placement(
            sketch, weights="streamed", activations="recompute", micro_batches=micro_batches, order=order
        )
        plan = lowered(sketch, choices)
        reads[order] = Counter(plan.buffers[item.writes[0].buffer].owner for item in turns(plan, "read"))
    # the last region's backward follows its forward, and the first one's is read again in each pass
    assert reads["vertical"]["w1"] == 2
    assert reads["vertical"]["w4"] == 1
    assert reads["horizontal"]["w1"] == 2 * micro_batches
    assert reads["horizontal"]["w4"] == micro_batches


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_estimate_follows_the_lowering(order: str, precision: str) -> None:
    sketch = chain(5, precision=precision, tied=True)
    problem = build_problem(sketch.graph(), costs_for(sketch, 3), micro_batches=3, order=order)
    estimator = Estimator(problem)
    for choice in (everything_resident(problem), most_frugal(estimator)):
        program = lower(problem, to_placement(problem, choice))
        found, estimate = simulate(problem, program), estimator.estimate(choice)
        held = estimate.memory.peak_bytes + problem.baseline_bytes
        assert held == pytest.approx(found.peak_bytes, rel=0.12)
        assert estimate.step_ns == pytest.approx(found.step_ns, rel=0.25)


def auto(sketch: Sketch, budget_bytes: int, **changes: object) -> Plan:
    """Activations and times of a slice are in proportion to its rows."""
    costs = sketch.costs(loss="mean", slices=[_scaled(sketch, count) for count in (2, 4)], **changes)
    config = RunConfig(budget=str(budget_bytes), solver=SolverConfig("greedy_async", micro_batches="auto"))
    return stage.run(config, sketch.graph(), costs)[0]


def _scaled(sketch: Sketch, count: int) -> SliceCosts:
    def smaller(size: int) -> int:
        return size // count

    regions = [
        replace(
            cost,
            forward_ns=smaller(cost.forward_ns),
            backward_ns=smaller(cost.backward_ns),
            saved_bytes=smaller(cost.saved_bytes),
            saved_storages=[smaller(cost.saved_bytes)],
        )
        for cost in sketch.costs().regions
    ]
    return SliceCosts(count, regions)


def test_the_solver_cuts_where_activations_do_not_fit_and_not_otherwise() -> None:
    sketch = chain(6, weight=20_000, width=1000)
    for block in sketch.blocks:
        block.saved_bytes = 40_000_000
    assert auto(sketch, 10**12).placement.micro_batches == 1
    assert auto(sketch, 120_000_000).placement.micro_batches > 1


def test_the_solver_does_not_cut_what_it_may_not() -> None:
    sketch = chain(6, weight=20_000, width=1000)
    for block in sketch.blocks:
        block.saved_bytes = 40_000_000
    costs = sketch.costs(slices=[_scaled(sketch, 2)], inseparable="its batch norm")
    config = RunConfig(budget="200MB", solver=SolverConfig("greedy_async", micro_batches="auto"))
    assert stage.run(config, sketch.graph(), costs)[0].placement.micro_batches == 1


def test_costs_of_another_number_of_slices_are_refused() -> None:
    sketch = chain(3)
    config = RunConfig(budget="1GB", solver=SolverConfig("resident"), train=TrainConfig(2))
    with pytest.raises(ArtifactError, match="costs are for 1 micro-batches; expected 2"):
        stage.run(config, sketch.graph(), sketch.costs())


def test_more_slices_than_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected 1 to 64"):
        graph_of_slice(chain(3).graph(), 65)


def test_rows_are_dealt_out_evenly() -> None:
    assert rows_of_slices(10, 4) == [3, 3, 2, 2]
    assert rows_of_slices(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize("solver", ["milp", "auto", "layerwise", "greedy_sync"])
def test_every_solver_plans_micro_batches(solver: str) -> None:
    sketch = chain(5, tied=True)
    costs = costs_for(sketch, 2)
    config = RunConfig(budget="150MB", solver=SolverConfig(solver, time_limit_s=4), train=TrainConfig(2))
    plan = stage.run(config, sketch.graph(), costs)[0]
    assert plan.placement.micro_batches == 2
    assert plan.loss == "mean"


def test_wide_values_are_those_of_one_micro_batch_at_a_time() -> None:
    sketch = chain(4)
    sketch.values["v2"] = 60_000_000  # the logits
    plan = lowered(sketch, placement(sketch, weights="streamed", micro_batches=4))
    order = [(item.region, item.micro_batch) for item in turns(plan, "forward", "backward")]
    assert order[8:12] == [(2, 0), (3, 0), (3, 0), (2, 0)]
    heads = [item for item in turns(plan, "read") if plan.buffers[item.writes[0].buffer].owner == "w2"]
    assert len(heads) == 1
    logits = sum(buffer.bytes for buffer in plan.buffers if buffer.owner == "v2" and buffer.role == "value")
    assert plan.prediction.peak_bytes < logits


def cut_costs(sketch: Sketch, count: int) -> Costs:
    """Costs of slices: times and activations in proportion to rows, gradients of weights not."""

    def part(size: int, fixed: int = 0) -> int:
        return fixed + (size - fixed) // count

    regions = []
    for cost, block in zip(sketch.costs().regions, sketch.blocks, strict=True):
        weights = 4 * sum(sketch.weights[name] for name in block.weights)
        changed = {
            "forward_ns": part(cost.forward_ns),
            "backward_ns": part(cost.backward_ns),
            "saved_bytes": part(cost.saved_bytes),
            "saved_storages": [part(cost.saved_bytes)],
            "forward_peak_bytes": part(cost.forward_peak_bytes),
            "dropped_forward_peak_bytes": part(cost.dropped_forward_peak_bytes),
            "backward_peak_bytes": part(cost.backward_peak_bytes, weights),
        }
        regions.append(replace(cost, **changed))
    loss = "mean" if count > 1 else ""
    return sketch.costs(micro_batches=count, regions=regions, loss=loss)


def language_model() -> tuple[Sketch, RegionGraph]:
    """A chain like a small GPT-2 with a batch of 64 rows: equal blocks, a head with wide logits, a loss."""
    sketch = chain(8, width=640_000, weight=3_000_000)
    for index, block in enumerate(sketch.blocks):
        block.kind = index
        block.saved_bytes = 12_000_000
    sketch.values["v6"] = 25_600_000  # the logits
    sketch.blocks[7].saved_bytes = 4 * sketch.values["v6"]
    graph = sketch.graph()

    def by_rows(value: Value) -> Value:
        (elements,) = value.spec.shape
        assert isinstance(elements, int)
        if elements < 64:
            return value
        return replace(value, spec=TensorSpec(["batch", elements // 64], [elements // 64, 1], "float32"))

    return sketch, replace(graph, values=[by_rows(value) for value in graph.values])


def test_four_slices_vertically_beat_the_whole_batch_and_four_one_by_one_under_a_tight_budget() -> None:
    sketch, graph = language_model()

    def plan(count: int, order: str, budget: int) -> Plan:
        config = RunConfig(
            budget=str(budget),
            solver=SolverConfig("greedy_async", micro_batch_order=order),
            train=TrainConfig(count),
            data=DataConfig(name="random", batch_size=64),
        )
        return stage.run(config, graph, cut_costs(sketch, count))[0]

    with pytest.raises(InfeasibleBudgetError) as refusal:
        plan(1, "vertical", 1)
    least = refusal.value.least_feasible_bytes
    assert least is not None
    budget = least * 101 // 100
    whole, vertical, horizontal = (
        plan(count, order, budget) for count, order in ((1, "vertical"), (4, "vertical"), (4, "horizontal"))
    )
    assert vertical.prediction.step_ns < whole.prediction.step_ns
    assert vertical.prediction.step_ns < horizontal.prediction.step_ns
    assert sum(vertical.prediction.moved_bytes.values()) < sum(whole.prediction.moved_bytes.values())
