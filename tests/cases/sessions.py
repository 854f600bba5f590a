"""Small models through the public API, held against the plain loop.

Region costs are measured; links and the optimizer are those of a made-up machine, so that preparing
takes no seconds and plans do not depend on what else this machine does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from stages import api
from stages.api import Prepared, Session
from stages.artifacts.errors import InfeasibleBudgetError
from stages.artifacts.plan import Plan
from stages.config import RuntimeConfig, TiersConfig
from stages.runtime.compute import Compute
from stages.solve.least_budget import most_frugal
from stages.solve.solvers import SOLVERS
from stages.solve.task import Solution, Task, realise
from tests import reference
from tests.models_for_tests import BY_NAME
from tests.parity.harness import costs_of

SEED = 3
LEARNING_RATE = 1e-2
STEPS = 20
AMPLE = "8GB"


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """The model that the reference starts from."""
    torch.manual_seed(SEED)
    return build()


def prepared(model: nn.Module, batch: Any, **settings: Any) -> Prepared:
    """As `stages.api.prepare`, on the made-up machine."""
    with mock.patch.object(api.profile, "run", lambda config, graph: costs_of(graph, config)):
        return api.prepare(model, batch, **{"lr": LEARNING_RATE, **settings})


def placed(prepared: Prepared, disk: Path, lane: str = "cpu") -> Prepared:
    """The same model with its disk tier in `disk`."""
    config = replace(prepared.config, tiers=TiersConfig(disk=str(disk)), runtime=RuntimeConfig(lane=lane))
    return replace(prepared, config=config)


def prepared_small(name: str, disk: Path, lane: str = "cpu", **settings: Any) -> Prepared:
    """A model of `tests.models_for_tests` on its usual batch, traced once for all tests."""
    return placed(_prepared_once(name, tuple(sorted(settings.items()))), disk, lane)


@cache
def _prepared_once(name: str, settings: tuple[tuple[str, Any], ...]) -> Prepared:
    model = BY_NAME[name]
    return prepared(seeded(model.build), model.batches(1)[0], **dict(settings))


def least_budget(prepared: Prepared) -> int:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        prepared.plan(1)
    assert refusal.value.least_feasible_bytes is not None
    return refusal.value.least_feasible_bytes


def frugal(prepared: Prepared) -> Plan:
    """The plan at the least budget: all weights and optimizer state come from disk at each use."""
    plan = prepared.plan(least_budget(prepared))
    assert_streamed(plan)
    return plan


def assert_streamed(plan: Plan) -> None:
    held = {buffer.owner for buffer in plan.buffers if buffer.role in ("weight", "state") and buffer.resident}
    assert not held, f"{sorted(held)} never leave memory"


def forced(prepared: Prepared, activations: str, **changes: Any) -> Plan:
    """A plan that streams everything and does the same with the activations of every region."""

    def solve(task: Task) -> Solution:
        choice = most_frugal(task.estimator)
        made = [activations if region.backward else "keep" for region in task.problem.regions]
        candidate = realise(task, replace(choice, activations=made, values=frozenset(), **changes))
        return Solution("forced", candidate, task.budget_bytes)

    with mock.patch.dict(SOLVERS, {prepared.config.solver.name: solve}):
        plan = prepared.plan(AMPLE)
    assert {region.activations for region in plan.placement.regions} >= {activations}
    return plan


@contextmanager
def gradients_seen() -> Iterator[list[dict[str, Tensor]]]:
    """Each parameter's complete gradient, one dict per step, as backward left it."""
    steps: list[dict[str, Tensor]] = []
    begin, check = Compute.begin, Compute._check

    def spied_begin(self: Compute, *args: Any, **settings: Any) -> None:
        steps.append({})
        begin(self, *args, **settings)

    def spied_check(self: Compute, name: str) -> None:
        check(self, name)
        if name in self.step.gradients:
            steps[-1][name] = self.step.gradients[name].clone()

    with mock.patch.object(Compute, "begin", spied_begin), mock.patch.object(Compute, "_check", spied_check):
        yield steps


def train(session: Session, batches: Sequence[Any], steps: int = STEPS) -> reference.Result:
    """As `tests.reference.train`, by steps of `session`."""
    result = reference.Result(losses=[], final={}, masters={}, rng_states=[])
    torch.manual_seed(SEED)
    for step in range(1, steps + 1):
        done = session.step_in_full(batches[(step - 1) % len(batches)])
        result.losses.append(done.loss)
        result.norms.append(done.grad_norm)
        result.rng_states.append(torch.get_rng_state())
        result.scales.append(done.loss_scale)
        if done.skipped:
            result.skipped_steps.append(step)
    result.final = session.state_dict()
    return result


def train_plainly(
    build: Callable[[], nn.Module],
    batches: Sequence[Any],
    steps: int = STEPS,
    precision: str = "fp32",
    **more: Any,
) -> reference.Result:
    """The plain loop, with the gradients of each step.

    Args:
        more: As for `tests.reference.train`.
    """
    return reference.train(
        build,
        batches,
        precision=precision,
        **{"optimizer": reference.adamw(lr=LEARNING_RATE), **more},
        steps=steps,
        seed=SEED,
        keep_gradients=True,
    )


def assert_same(found: reference.Result, expected: reference.Result) -> None:
    """Losses, skips, generator states and final tensors, bitwise."""
    assert found.losses == expected.losses
    assert found.skipped_steps == expected.skipped_steps
    for step, states in enumerate(zip(found.rng_states, expected.rng_states, strict=True), start=1):
        assert torch.equal(*states), f"the generator differs after step {step}"
    assert_same_tensors(found.final, expected.final)


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        different = int((found[name] != tensor).sum())
        assert torch.equal(found[name], tensor), f"{different} of {tensor.numel()} differ in {name}"


def training_state(session: Session) -> dict[str, bytes]:
    """Weights, masters, moments and buffers by name, wherever they are."""
    homes = session._open_engine().homes()
    return {tensor.name: b"".join(map(bytes, homes.read(tensor))) for tensor in homes.tensors}
