"""Checks a plan against its graph and costs, and trusts nothing that made it.

Shares no code with lowering, layout and simulator: what it needs of order, versions, memory and
meaning it derives again from the instructions alone.
"""

from __future__ import annotations

from stages.artifacts.costs import Costs
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Phase, Plan
from stages.artifacts.slicing import LOSSES, costs_of_slice, graph_of_slice
from stages.solve.errors import PlanError
from stages.solve.verifier.content import check_content
from stages.solve.verifier.disk import check_homes, check_host
from stages.solve.verifier.meaning import check_evaluation, check_training
from stages.solve.verifier.memory import check_budgets, check_pace, check_slots
from stages.solve.verifier.order import Order


def verify(
    plan: Plan,
    graph: RegionGraph,
    costs: Costs,
    *,
    evaluation: tuple[RegionGraph, Costs] | None = None,
    disk_budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
) -> None:
    """Checks that `plan` computes what `graph` says, under every timing of its transfers, in budget.

    Raises:
        PlanError: It does not; names phase and instruction.
    """
    graph, costs = _of_slice(plan, graph, costs)
    names = [phase.name for phase in plan.phases]
    known = [name for name in ("step", "accumulate", "update", "evaluate") if name in names]
    if names != known or "step" not in names or ("accumulate" in names and "update" not in names):
        raise PlanError(f"phases are {', '.join(names)}; expected step, then accumulate, update or evaluate")
    if ("accumulate" in names) != (plan.accumulate > 1):
        raise PlanError(f"{plan.accumulate} batches a step, and phases {', '.join(names)}")
    if [buffer.id for buffer in plan.buffers] != list(range(len(plan.buffers))):
        raise PlanError("buffer ids are not their positions in the list")
    aliases = check_homes(plan, graph, costs)
    orders = [Order(phase) for phase in plan.phases]
    for phase, order in zip(plan.phases, orders, strict=True):
        check_content(plan, phase, order, aliases)
        check_slots(plan, phase, order)
        check_pace(plan, phase, order)
    _check_borders(plan)
    check_training(plan, graph, costs)
    if "evaluate" in names:
        if evaluation is None:
            raise PlanError("the plan has a phase evaluate, but no evaluation graph was given")
        check_evaluation(plan, *evaluation)
    check_budgets(plan, orders, costs, disk_budget_bytes)
    check_host(plan, costs, host_budget_bytes)


def _of_slice(plan: Plan, graph: RegionGraph, costs: Costs) -> tuple[RegionGraph, Costs]:
    """Graph and costs of one micro-batch, and whether the batch may be cut at all."""
    count = plan.placement.micro_batches
    if count < 1:
        raise PlanError(f"the plan has {count} micro-batches")
    if count == 1:
        return graph, costs_of_slice(costs, 1)
    mutated = [name for region in graph.regions for name in region.mutates]
    if mutated:
        raise PlanError(f"{count} micro-batches would each change {mutated[0]}, which a batch changes once")
    if plan.loss not in LOSSES or plan.loss != costs.loss:
        raise PlanError(
            f"the plan adds up the losses of micro-batches as {plan.loss or 'nothing'}; the costs say "
            f"{costs.loss or 'that they cannot be added up'}"
        )
    for buffer in plan.buffers:
        allowed = count if buffer.role in ("value", "value_gradient", "saved", "gradient") else 1
        if not 0 <= buffer.micro_batch < allowed:
            raise PlanError(
                f"buffer {buffer.id} is of micro-batch {buffer.micro_batch}, which does not exist"
            )
    return graph_of_slice(graph, count), costs_of_slice(costs, count)


def _check_borders(plan: Plan) -> None:
    """Each phase ends as each of its successors begins; the batch is exchanged between phases."""
    by_name = {phase.name: phase for phase in plan.phases}
    for phase in plan.phases:
        if not phase.successors:
            raise PlanError(f"phase {phase.name} has no successor")
        for successor in phase.successors:
            if successor not in by_name:
                raise PlanError(f"phase {phase.name} names the successor {successor}, which the plan lacks")
            leaves, enters = _state_at(plan, phase, "exit"), _state_at(plan, by_name[successor], "entry")
            if leaves != enters:
                owner, tier = sorted(leaves ^ enters)[0]
                raise PlanError(
                    f"phase {phase.name} does not end as phase {successor} begins: {owner} on {tier} "
                    f"is in one of the two only"
                )


def _state_at(plan: Plan, phase: Phase, border: str) -> set[tuple[str, str]]:
    """What is where: (buffer, tier); a gradient counts by its owner, whole or in pieces."""
    found = set()
    for location in phase.exit if border == "exit" else phase.entry:
        buffer = plan.buffers[location.buffer]
        if buffer.role == "gradient":
            found.add((f"gradient of {buffer.owner}", location.tier))
        elif buffer.role in ("weight", "master", "state", "persistent"):
            found.add((f"buffer {buffer.id} ({buffer.role} of {buffer.owner})", location.tier))
        elif not buffer.resident:
            raise PlanError(f"phase {phase.name}: {buffer.role} {buffer.owner} crosses its {border}")
    return found
