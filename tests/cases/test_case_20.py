"""Case 20: torch's schedulers take the session's optimizer, and the learning rate used is theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from stages.api import Session
from tests import reference
from tests.cases.sessions import (
    LEARNING_RATE,
    SEED,
    assert_same,
    frugal,
    placed,
    prepared,
    prepared_small,
    seeded,
    train_plainly,
)
from tests.models_for_tests import GPT2

STEPS = 10

SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda done: 0.9**done),
    # cycles betas too
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
        optimizer, T_0=4
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*:UserWarning")
def test_the_learning_rate_used_is_the_schedules(name: str, precision: str, tmp_path: Path) -> None:
    batches = GPT2.batches(3)
    # a loss scale that is too large at first: skipped steps leave the schedule where it is
    scale = {"initial": 2.0**22, "hysteresis": 1}
    before = placed(prepared(seeded(GPT2.build), batches[0], precision=precision, loss_scale=scale), tmp_path)
    found = reference.Result(losses=[], final={}, masters={}, rng_states=[])
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        assert isinstance(session.optimizer, torch.optim.Optimizer)
        schedule = SCHEDULERS[name](session.optimizer)
        torch.manual_seed(SEED)
        for step in range(1, STEPS + 1):
            done = session.step_in_full(batches[(step - 1) % 3])
            found.losses.append(done.loss)
            found.rng_states.append(torch.get_rng_state())
            found.learning_rates.append(list(done.learning_rates))
            if done.skipped:
                found.skipped_steps.append(step)
            else:
                schedule.step()
        found.final = session.state_dict()
    expected = train_plainly(
        GPT2.build,
        batches,
        steps=STEPS,
        precision=precision,
        scheduler=SCHEDULERS[name],
        scale=reference.LossScale(value=scale["initial"], hysteresis=1),
    )
    assert bool(expected.skipped_steps) == (precision == "fp16")
    assert len({rates[0] for rates in expected.learning_rates}) > 3
    assert found.learning_rates == expected.learning_rates
    assert_same(found, expected)


def test_a_learning_rate_given_with_a_step_goes_before(tmp_path: Path) -> None:
    batches = GPT2.batches(1)
    before = prepared_small("gpt2", tmp_path)
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        assert session.step_in_full(batches[0]).learning_rates == (LEARNING_RATE,)
        assert session.step_in_full(batches[0], lr=0.5).learning_rates == (0.5,)
