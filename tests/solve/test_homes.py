"""Beside an accelerator what moves waits in host memory, and on disk only what that does not hold."""

from __future__ import annotations

import msgspec
import pytest

from stages.artifacts.costs import Costs, LinkCost
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import BOUNCE_BYTES, Plan
from stages.config import RunConfig, SolverConfig, TiersConfig
from stages.solve.build import build_problem
from stages.solve.errors import PlanError
from stages.solve.homes import Tenant, choose_disk
from stages.solve.stage import run
from stages.solve.verifier import verify
from tests.solve.planning import ROOMY
from tests.solve.synthetic import MEGA, Sketch, chain

HOST_PROCESS = 50 * MEGA
LINKS = [
    LinkCost("upload", 10_000, 25 * 10**9, 20 * 10**9),
    LinkCost("download", 10_000, 24 * 10**9, 19 * 10**9),
    LinkCost("disk_read", 100_000, 7 * 10**9, 3 * 10**9),
    LinkCost("disk_write", 100_000, 5 * 10**9, 2 * 10**9),
]


def costs_of(sketch: Sketch, **changes: object) -> Costs:
    return sketch.costs(
        device="cuda", source="roofline", links=LINKS, host_baseline_bytes=HOST_PROCESS, **changes
    )


def settings(budget_bytes: int, solver: str, host_bytes: int, disk_bytes: int) -> RunConfig:
    tiers = TiersConfig(host_budget=str(host_bytes), disk_budget=str(disk_bytes))
    return RunConfig(budget=str(budget_bytes), solver=SolverConfig(solver), tiers=tiers)


def planned(
    budget_bytes: int, host_bytes: int, disk_bytes: int = ROOMY, solver: str = "greedy_async"
) -> tuple[Sketch, Plan]:
    sketch = chain(8)
    plan, _ = run(settings(budget_bytes, solver, host_bytes, disk_bytes), sketch.graph(), costs_of(sketch))
    return sketch, plan


def homes(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"host": set(), "disk": set()}
    for buffer in plan.buffers:
        if buffer.extent is not None:
            found[buffer.home].add(buffer.role)
    return found


TIGHT = 90 * MEGA


def test_a_host_with_room_holds_all_and_no_disk_is_needed() -> None:
    _, plan = planned(TIGHT, ROOMY)
    assert plan.disk_bytes == 0
    assert not homes(plan)["disk"]
    assert plan.host_pool_bytes > 0
    assert plan.host_bytes > HOST_PROCESS + plan.host_pool_bytes  # and the records of the plan
    assert "disk_read" not in plan.prediction.moved_bytes


def test_what_the_host_does_not_hold_goes_to_disk_and_costs_time() -> None:
    _, roomy = planned(TIGHT, ROOMY)
    _, tight = planned(TIGHT, HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA)
    assert tight.host_bytes <= HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA
    assert tight.disk_bytes > 0
    assert tight.prediction.step_ns > roomy.prediction.step_ns
    assert 0 < tight.prediction.moved_bytes["disk_read"] <= tight.prediction.moved_bytes["read"]


def test_what_moves_most_per_byte_stays_on_the_host() -> None:
    size = 2 * BOUNCE_BYTES
    tenants = [
        Tenant(("state", "a", "exp_avg", 0), size, 2 * size),
        Tenant(("weight", "a", "", 0), size, 3 * size),
        Tenant(("saved", "r", "", 0), size, 2 * size),
    ]
    assert choose_disk(tenants, 3 * size) == frozenset()
    assert choose_disk(tenants, 3 * size - 1) == {("state", "a", "exp_avg", 0)}
    # the bounce buffer takes its part of what is left
    assert choose_disk(tenants, 2 * size) == {("state", "a", "exp_avg", 0), ("saved", "r", "", 0)}


def test_a_bounce_buffer_is_booked_only_where_something_waits_on_disk() -> None:
    sketch, plan = planned(TIGHT, HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA)
    short = msgspec.structs.replace(plan, host_bytes=plan.host_bytes - BOUNCE_BYTES)
    with pytest.raises(PlanError, match="host memory"):
        verify(short, sketch.graph(), costs_of(sketch))


def test_a_link_to_the_disk_is_as_slow_as_its_slower_part() -> None:
    sketch = chain(2)
    problem = build_problem(sketch.graph(), costs_of(sketch))
    assert problem.link("read", "host").name == "upload"
    far = problem.link("read", "disk")
    assert (far.latency_ns, far.bytes_per_s) == (110_000, 7 * 10**9)
    assert problem.link("write", "disk").contended_bytes_per_s == 2 * 10**9


def test_the_verifier_holds_a_plan_against_host_memory() -> None:
    sketch, plan = planned(TIGHT, ROOMY)
    graph, costs = sketch.graph(), costs_of(sketch)
    verify(plan, graph, costs, host_budget_bytes=plan.host_bytes)
    with pytest.raises(PlanError, match=r"tiers\.host_budget"):
        verify(plan, graph, costs, host_budget_bytes=plan.host_bytes - 1)
    small = msgspec.structs.replace(plan, host_pool_bytes=plan.host_pool_bytes - 4096)
    with pytest.raises(PlanError, match="on host"):
        verify(small, graph, costs)


def test_the_verifier_wants_one_home_for_a_tensor() -> None:
    sketch, plan = planned(TIGHT, ROOMY)
    pieces = [item for item in plan.buffers if item.role == "state" and item.extent is not None]
    moved = msgspec.structs.replace(pieces[0], home="disk")
    assert sum((item.owner, item.state) == (moved.owner, moved.state) for item in pieces) > 1
    buffers = [moved if item.id == moved.id else item for item in plan.buffers]
    torn = msgspec.structs.replace(plan, buffers=buffers, disk_bytes=ROOMY)
    with pytest.raises(PlanError, match="homes on disk and in host memory"):
        verify(torn, sketch.graph(), costs_of(sketch))


def test_on_the_processor_the_only_home_is_the_disk() -> None:
    sketch = chain(8)
    plan, _ = run(settings(TIGHT, "greedy_async", 1, ROOMY), sketch.graph(), sketch.costs())
    assert (plan.host_bytes, plan.host_pool_bytes, homes(plan)["host"]) == (0, 0, set())
    changed = [
        msgspec.structs.replace(item, home="host") if item.extent is not None else item
        for item in plan.buffers
    ]
    with pytest.raises(PlanError, match="expected disk"):
        verify(msgspec.structs.replace(plan, buffers=changed), sketch.graph(), sketch.costs())


@pytest.mark.parametrize("solver", ["layerwise", "greedy_sync", "greedy_async"])
def test_host_and_disk_that_are_too_small_are_refused_by_name(solver: str) -> None:
    host = HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA
    with pytest.raises(InfeasibleBudgetError, match=str(host)) as refusal:
        planned(TIGHT, host, 10 * MEGA, solver)
    assert refusal.value.key == "tiers.disk_budget"
    assert "host memory" in str(refusal.value)
    assert "disk" in str(refusal.value)


def test_a_host_without_room_for_the_process_is_refused() -> None:
    with pytest.raises(InfeasibleBudgetError, match="process alone") as refusal:
        planned(TIGHT, HOST_PROCESS - 1)
    assert refusal.value.key == "tiers.host_budget"


@pytest.mark.parametrize("solver", ["layerwise", "greedy_async"])
def test_each_micro_batch_has_homes_of_its_own(solver: str) -> None:
    sketch = chain(8)
    config = settings(TIGHT, solver, HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA, ROOMY)
    config.train.micro_batches = 2
    plan, _ = run(config, sketch.graph(), costs_of(sketch, micro_batches=2, loss="mean"))
    assert plan.placement.micro_batches == 2
    ends = {"host": 0, "disk": 0}
    booked = {"host": plan.host_pool_bytes, "disk": plan.disk_bytes}
    for buffer in plan.buffers:
        if buffer.extent is not None:
            last = -(-buffer.bytes // 4096) * 4096 + buffer.extent
            ends[buffer.home] = max(ends[buffer.home], last)
    assert ends == booked  # no gaps are booked at the end


@pytest.mark.parametrize("host_bytes", [ROOMY, HOST_PROCESS + BOUNCE_BYTES + 60 * MEGA])
def test_saved_activations_have_room_for_each_storage_on_a_border_of_its_own(host_bytes: int) -> None:
    sketch = chain(8)
    costs = costs_of(sketch)
    odd = [
        msgspec.structs.replace(cost, saved_storages=[1, 2, cost.saved_bytes - 3]) for cost in costs.regions
    ]
    costs = msgspec.structs.replace(costs, regions=odd)
    plan, _ = run(settings(TIGHT, "greedy_async", host_bytes, ROOMY), sketch.graph(), costs)
    for home, size in (("host", plan.host_pool_bytes), ("disk", plan.disk_bytes)):
        there = [item for item in plan.buffers if item.extent is not None and item.home == home]
        borders = [*sorted(item.extent or 0 for item in there), size]
        for item in there:
            if item.role == "saved":
                following = next(border for border in borders if border > (item.extent or 0))
                needed = sum(-(-storage // 4096) * 4096 for storage in odd[0].saved_storages)
                assert following - (item.extent or 0) >= needed
    assert any(item.role == "saved" and item.extent is not None for item in plan.buffers)
