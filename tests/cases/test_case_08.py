"""Case 8: evaluation between training steps must leave no trace in training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.api import Session
from stages.artifacts.errors import ConfigError
from tests import reference
from tests.cases.sessions import (
    LEARNING_RATE,
    SEED,
    assert_same_tensors,
    frugal,
    prepared_small,
    seeded,
    train,
)
from tests.models_for_tests import BY_NAME

#: one with dropout and a tied weight; one with running statistics that evaluation reads
MODELS = ("gpt2", "conv_bn")
TRAIN_STEPS = 2


def plainly(model: nn.Module, batches: Sequence[Any]) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Losses of two steps, two evaluations and two steps; then the generator's state and the weights."""
    optimizer = reference.adamw(lr=LEARNING_RATE)(list(model.parameters()))
    losses = []
    torch.manual_seed(SEED)
    for round_number in range(2):
        model.train()
        for batch in batches[TRAIN_STEPS * round_number :][:TRAIN_STEPS]:
            loss = reference.loss_of(reference.call(model, batch))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if round_number == 0:
            model.eval()
            with torch.no_grad():
                losses += [reference.loss_of(reference.call(model, batch)).item() for batch in batches[:2]]
    return losses, torch.get_rng_state(), dict(model.state_dict())


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
@pytest.mark.parametrize("name", MODELS)
def test_training_goes_on_as_if_nothing_had_been_evaluated(name: str, lane: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    batches = model.batches(2 * TRAIN_STEPS)
    built = seeded(model.build)
    hooks = hooks_of(built)
    before = prepared_small(name, tmp_path, lane, evaluate=True)
    with Session(built, before, frugal(before)) as session:
        torch.manual_seed(SEED)
        losses = [session.step(batch) for batch in batches[:TRAIN_STEPS]]
        weights, generator = session.state_dict(), torch.get_rng_state()
        losses += [session.evaluate(batch) for batch in batches[:2]]
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_tensors(session.state_dict(), weights)
        losses += [session.step(batch) for batch in batches[TRAIN_STEPS:]]
        generator, final = torch.get_rng_state(), session.state_dict()
    expected_losses, expected_generator, expected = plainly(seeded(model.build), batches)
    assert losses == expected_losses
    assert torch.equal(generator, expected_generator)
    assert_same_tensors(final, expected)
    assert hooks_of(built) == hooks


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_evaluations_change_nothing_in_16_bit(precision: str, tmp_path: Path) -> None:
    model = BY_NAME["gpt2"]
    batches = model.batches(4)
    built = seeded(model.build)
    before = prepared_small("gpt2", tmp_path, evaluate=True, precision=precision)
    with Session(built, before, frugal(before)) as session:
        with_none = train(session, batches, steps=4)
    with Session(built, before, frugal(before)) as session:
        torch.manual_seed(SEED)
        losses = []
        for batch in batches:
            losses.append(session.step(batch))
            evaluated = session.evaluate(batch)
            assert evaluated == session.evaluate(batch)
        assert losses == with_none.losses
        assert_same_tensors(session.state_dict(), with_none.final)


def test_a_session_without_evaluation_says_how_to_get_it(tmp_path: Path) -> None:
    model = BY_NAME["mlp"]
    built, batch = seeded(model.build), model.batches(1)[0]
    before = prepared_small("mlp", tmp_path)
    with Session(built, before, frugal(before)) as session, pytest.raises(ConfigError, match="evaluate=True"):
        session.evaluate(batch)


def hooks_of(model: nn.Module) -> list[tuple[str, int]]:
    """How many hooks each module has; a model is left as it was given."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [
        (name, sum(len(getattr(module, kind)) for kind in kinds)) for name, module in model.named_modules()
    ]
