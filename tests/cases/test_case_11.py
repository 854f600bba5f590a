"""Case 11: four micro-batches of one against one batch of four give equal gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.api import Prepared, Session
from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Plan
from stages.artifacts.slicing import ORDERS
from tests.cases.sessions import AMPLE, LEARNING_RATE, SEED, gradients_seen, placed, prepared, seeded
from tests.models_for_tests import BY_NAME, GPT2
from tests.reference import adamw
from tests.reference import train as train_plainly

MICRO_BATCHES = 4

#: rounding of the sums alone: the mean over four rows is taken at once, or from four of one row
TOLERANCE = 1e-6


def without_dropout() -> torch.nn.Module:
    """Masks depend on the shape that is drawn at once; everything else must not."""
    model = GPT2.build()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attn_dropout"):
            module.attn_dropout.p = 0.0
    return model


def batch_of_four(ignored: bool) -> dict[str, Tensor]:
    batch = GPT2.batches(1, rows=MICRO_BATCHES)[0]
    if ignored:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 5:] = -100
        batch["labels"][2, :9] = -100
    return batch


@pytest.fixture(scope="module")
def planned() -> Prepared:
    return prepared(seeded(without_dropout), batch_of_four(False), micro_batches=MICRO_BATCHES)


def plan_in(order: str, prepared: Prepared) -> Plan:
    solver = replace(prepared.config.solver, micro_batch_order=order)
    return replace(prepared, config=replace(prepared.config, solver=solver)).plan(AMPLE)


@pytest.mark.parametrize("ignored", [False, True], ids=["all_targets", "unequal_targets"])
@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_of_the_batch(
    planned: Prepared, order: str, ignored: bool, tmp_path: Path
) -> None:
    batch = batch_of_four(ignored)
    whole = train_plainly(
        without_dropout, [batch], optimizer=adamw(lr=LEARNING_RATE), steps=1, seed=SEED, keep_gradients=True
    )
    before, plan = placed(planned, tmp_path), plan_in(order, planned)
    assert plan.loss == "token_mean"
    with Session(seeded(without_dropout), before, plan) as session, gradients_seen() as steps:
        torch.manual_seed(SEED)
        loss = session.step(batch)
    assert loss == pytest.approx(whole.losses[0], rel=TOLERANCE)
    assert_close(steps[0], whole.gradients[0])


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        difference = (found[name] - gradient).norm() / gradient.norm()
        assert difference <= TOLERANCE, f"{name} differs by {float(difference):.1e} of its norm"


def test_a_model_whose_rows_meet_is_refused_and_trains_whole() -> None:
    model: Any = BY_NAME["conv_bn"]
    with pytest.raises(ConfigError, match="running statistics") as refusal:
        prepared(seeded(model.build), model.batches(1, rows=4)[0], micro_batches=2)
    assert refusal.value.key == "train.micro_batches"
