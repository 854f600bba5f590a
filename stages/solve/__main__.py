"""The solve stage alone: `python -m stages.solve model=gpt2 budget=8GB`, after stages.trace.profile."""

from __future__ import annotations

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.process import Order, stage_main


def work(order: Order) -> None:
    from stages.solve.stage import run  # not while composing

    graph, costs = order.load(RegionGraph), order.load(Costs)
    if "plan" in order.inputs:
        check(order, order.load(Plan), graph, costs)
        return
    if "previous" in order.inputs:
        from stages.solve.replan import run_again

        previous = envelope.load(order.inputs["previous"], Plan)
        plan, predicted = run_again(order.config, graph, costs, previous, evaluation=order.load_evaluation())
        order.save(predicted)
        order.save(plan)
        return
    plan, predicted = run(order.config, graph, costs, evaluation=order.load_evaluation())
    order.save(predicted)
    order.save(plan)


def check(order: Order, plan: Plan, graph: RegionGraph, costs: Costs) -> None:
    """Verifies a plan that was made before: files can be damaged, or somebody else's.

    Raises:
        ArtifactError: The plan is not one for these artifacts and this budget.
    """
    from stages.solve.stage import tier_budgets
    from stages.solve.verifier import verify

    if plan.budget_bytes != order.config.budget_bytes:
        raise ArtifactError(
            f"the plan is for a budget of {plan.budget_bytes} bytes; expected {order.config.budget_bytes}. "
            f"Delete it and run again"
        )
    tiers = tier_budgets(order.config, costs)
    verify(
        plan,
        graph,
        costs,
        evaluation=order.load_evaluation(),
        disk_budget_bytes=tiers.disk_bytes,
        host_budget_bytes=tiers.host_bytes,
    )


if __name__ == "__main__":
    stage_main("solve", work)
