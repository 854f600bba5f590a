"""Corrected costs predict what was measured."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from stages.artifacts.costs import Costs, SliceCosts
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig
from stages.runtime.replan.correct import corrected
from stages.runtime.replan.measure import class_of, instructions_of_step, least_step_ns, ratios
from stages.solve import stage as solve
from stages.solve.replan import LEAST_GAIN, is_better, predict_again, with_numbers_of
from tests.models_for_tests import BY_NAME
from tests.parity.harness import LEAST, config_of, plan_of, traced

Planned = tuple[RegionGraph, Costs, Plan, Timeline, RunConfig]


@pytest.fixture(scope="module")
def job() -> Planned:
    """Graph, costs, plan and predicted timeline of a plan that moves, recomputes and updates."""
    graph, costs = traced(BY_NAME["mlp"], "fp16", 2)
    config = config_of(BY_NAME["mlp"], "fp16", rows=2, budget=1, solver=LEAST.solver)
    plan = plan_of(config, graph, costs, LEAST)
    again, predicted = predict_again(graph, costs, plan)
    assert again.prediction.step_ns == plan.prediction.step_ns
    return graph, costs, plan, predicted, config


def on_a_machine(costs: Costs, factors: dict[str, float]) -> Costs:
    """Costs of a machine that differs by a factor for each class."""
    regions = [
        msgspec.structs.replace(
            cost,
            forward_ns=round(cost.forward_ns * factors["forward"] * (1 + cost.kind)),
            backward_ns=round(cost.backward_ns * factors["backward"]),
        )
        for cost in costs.regions
    ]
    names = {"disk_read": "read", "disk_write": "write"}
    links = [
        msgspec.structs.replace(
            link,
            latency_ns=round(link.latency_ns * factors[names[link.name]]),
            bytes_per_s=round(link.bytes_per_s / factors[names[link.name]]),
            contended_bytes_per_s=round(link.contended_bytes_per_s / factors[names[link.name]]),
        )
        for link in costs.links
    ]
    optimizer = msgspec.structs.replace(
        costs.optimizer,
        elements_per_s=round(costs.optimizer.elements_per_s / factors["update"]),
        latency_ns=round(costs.optimizer.latency_ns * factors["update"]),
    )
    return msgspec.structs.replace(costs, regions=regions, links=links, optimizer=optimizer)


def durations(plan: Plan, predicted: Timeline) -> list[int]:
    """A step as measured: the events of a timeline, and "free", which takes no time."""
    events = iter(predicted.events)
    return [
        0 if item.operation == "free" else (event := next(events)).end_ns - event.start_ns
        for item in instructions_of_step(plan)
    ]


FACTORS = {"forward": 3.0, "backward": 0.5, "read": 4.0, "write": 1.5, "update": 2.0}


def test_costs_of_the_real_machine_are_found_from_its_steps(job: Planned) -> None:
    graph, costs, plan, predicted, _ = job
    real = on_a_machine(costs, FACTORS)
    truth, timeline = predict_again(graph, real, plan)
    measured = [durations(plan, timeline)] * 2
    found = corrected(costs, ratios(plan, graph, predicted, measured), 10**6)
    again, _ = predict_again(graph, found, plan)
    assert again.prediction.step_ns == pytest.approx(truth.prediction.step_ns, rel=0.05)
    assert abs(plan.prediction.step_ns - truth.prediction.step_ns) > 0.15 * truth.prediction.step_ns
    assert found.baseline_bytes == costs.baseline_bytes + 10**6
    for cost, expected in zip(found.regions, real.regions, strict=True):
        assert cost.forward_ns == pytest.approx(expected.forward_ns, rel=0.01)
        assert cost.backward_ns == pytest.approx(expected.backward_ns, rel=0.01)


def test_what_is_as_predicted_is_left_as_it_is(job: Planned) -> None:
    graph, costs, plan, predicted, _ = job
    found = ratios(plan, graph, predicted, [durations(plan, predicted)])
    assert set(found.values()) == {1.0}
    assert corrected(costs, found, -(10**6)) == costs


def test_timelines_of_another_plan_are_refused(job: Planned) -> None:
    graph, _, plan, predicted, _ = job
    with pytest.raises(ValueError, match="expected"):
        ratios(plan, graph, predicted, [durations(plan, predicted)[:-1]])


def test_recomputing_is_what_a_plan_may_save(job: Planned) -> None:
    graph, _, plan, predicted, _ = job
    step = durations(plan, predicted)
    again = sum(
        took
        for took, item in zip(step, instructions_of_step(plan), strict=True)
        if item.operation not in ("forward", "backward", "update")
    )
    assert least_step_ns(plan, step) == sum(step) - again
    recomputed = [item for item in instructions_of_step(plan) if item.operation == "recompute"]
    assert all(class_of(item, graph)[0] == "forward" for item in recomputed)


def test_other_cuts_of_the_batch_are_corrected_alike(job: Planned) -> None:
    _, costs, _, _, _ = job
    both = msgspec.structs.replace(costs, slices=[SliceCosts(2, costs.regions)])
    found = corrected(both, {("forward", 0): 2.0}, 0)
    assert found.slices[0].regions == found.regions != costs.regions


def test_the_batch_stays_cut_as_it_is(job: Planned) -> None:
    _, _, plan, _, config = job
    free = replace(config, solver=replace(config.solver, micro_batches="auto"))
    placement = msgspec.structs.replace(plan.placement, micro_batches=2)
    kept = with_numbers_of(free, msgspec.structs.replace(plan, placement=placement))
    assert (kept.solver.micro_batches, kept.train.micro_batches) == ("given", 2)


def test_another_plan_must_be_faster_by_more_than_noise_or_save_memory(job: Planned) -> None:
    graph, costs, _, _, config = job
    made, _ = solve.run(config, graph, costs)

    def predicted(step_ns: float, peak_bytes: int) -> Plan:
        prediction = msgspec.structs.replace(made.prediction, step_ns=round(step_ns), peak_bytes=peak_bytes)
        return msgspec.structs.replace(made, prediction=prediction)

    fits = made.budget_bytes - made.margin_bytes
    kept = predicted(10**9, fits)
    assert not is_better(predicted((1 - LEAST_GAIN / 2) * 10**9, fits), kept)
    assert is_better(predicted((1 - 2 * LEAST_GAIN) * 10**9, fits), kept)
    assert is_better(predicted(2 * 10**9, fits), predicted(10**9, fits + 1))
