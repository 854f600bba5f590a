"""A loop of the user's own: several backward calls, then the update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.api import Session
from stages.artifacts.errors import ConfigError, StageError
from tests.cases.sessions import LEARNING_RATE, SEED, assert_same_tensors, frugal, prepared_small, seeded
from tests.models_for_tests import BY_NAME
from tests.reference import adamw, call, loss_of

MODEL = BY_NAME["mlp"]


WEIGHTS = (0.5, 2.0, 1.0)
CALLS = (3, 1, 2)
MAX_NORM = 0.05


def plainly(batches: list[Any]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and final weights of the plain loop."""
    model = seeded(MODEL.build)
    optimizer = adamw(lr=LEARNING_RATE)(list(model.parameters()))
    losses, norms = [], []
    torch.manual_seed(SEED)
    for count in CALLS:
        optimizer.zero_grad()
        for batch, weight in zip(batches[:count], WEIGHTS, strict=False):
            loss = loss_of(call(model, batch))
            (loss * weight).backward()
            losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)))
        optimizer.step()
    return losses, norms, dict(model.state_dict())


def test_any_number_of_backward_calls_with_weights_of_ones_own(tmp_path: Path) -> None:
    batches = MODEL.batches(3)
    before = prepared_small("mlp", tmp_path, accumulate=2, max_grad_norm=MAX_NORM)
    losses, norms = [], []
    with Session(seeded(MODEL.build), before, frugal(before)) as session:
        torch.manual_seed(SEED)
        for count in CALLS:
            losses += [session.backward(*pair) for pair in zip(batches[:count], WEIGHTS, strict=False)]
            norms.append(session.apply().grad_norm)
        final = session.state_dict()
    expected_losses, expected_norms, expected = plainly(batches)
    assert losses == expected_losses
    assert norms == expected_norms
    assert_same_tensors(final, expected)


def test_what_cannot_be_between_a_backward_and_its_update_is_refused(tmp_path: Path) -> None:
    batch = MODEL.batches(1)[0]
    before = prepared_small("mlp", tmp_path, accumulate=2, evaluate=True)
    with Session(seeded(MODEL.build), before, frugal(before)) as session:
        with pytest.raises(StageError, match="without gradients"):
            session.apply()
        session.backward(batch)
        with pytest.raises(StageError, match="between a backward and its update"):
            session.evaluate(batch)
        session.apply()
        session.evaluate(batch)


def test_a_plan_of_one_batch_a_step_says_what_to_ask_for(tmp_path: Path) -> None:
    batch = MODEL.batches(1)[0]
    plain = prepared_small("mlp", tmp_path)
    with (
        Session(seeded(MODEL.build), plain, frugal(plain)) as session,
        pytest.raises(ConfigError, match="accumulate"),
    ):
        session.backward(batch)
    clipped = prepared_small("mlp", tmp_path, max_grad_norm=1.0)
    with Session(seeded(MODEL.build), clipped, frugal(clipped)) as session:
        session.backward(batch)
        with pytest.raises(ConfigError, match="accumulate=2"):
            session.backward(batch)
        session.apply()
