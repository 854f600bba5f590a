"""Case 23: batches that are smaller than planned, down to one sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.api import Session
from stages.artifacts.errors import DataError
from tests.cases.sessions import (
    LEARNING_RATE,
    SEED,
    assert_same,
    assert_same_tensors,
    frugal,
    placed,
    prepared,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import BY_NAME, GPT2

SAMPLES = GPT2.batches(1, rows=10)[0]


def in_batches_of(rows: int) -> list[dict[str, Tensor]]:
    parts = zip(*(samples.split(rows) for samples in SAMPLES.values()), strict=True)
    return [dict(zip(SAMPLES, part, strict=True)) for part in parts]


@pytest.fixture(scope="module")
def planned_for_four() -> Any:
    return prepared(seeded(GPT2.build), in_batches_of(4)[0])


def test_ten_samples_in_batches_of_four(planned_for_four: Any, tmp_path: Path) -> None:
    batches = in_batches_of(4)
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 2]
    before = placed(planned_for_four, tmp_path)
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        assert_same(train(session, batches), train_plainly(GPT2.build, batches))


def test_batches_of_one_on_a_plan_for_four(planned_for_four: Any, tmp_path: Path) -> None:
    batches = in_batches_of(1)
    before = placed(planned_for_four, tmp_path)
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        assert_same(train(session, batches), train_plainly(GPT2.build, batches))


def test_batches_of_one_planned_as_such(tmp_path: Path) -> None:
    batches = in_batches_of(1)
    before = prepared(seeded(GPT2.build), batches[0], disk=str(tmp_path))
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        assert_same(train(session, batches), train_plainly(GPT2.build, batches))


def test_statistics_over_a_short_batch(tmp_path: Path) -> None:
    model = BY_NAME["conv_bn"]
    batches = [model.batches(1, rows=rows)[0] for rows in (2, 2, 1)]
    before = prepared_small("conv_bn", tmp_path)
    with Session(seeded(model.build), before, frugal(before)) as session:
        assert_same(train(session, batches), train_plainly(model.build, batches))


def test_a_larger_batch_is_refused_before_the_step(tmp_path: Path) -> None:
    batches = GPT2.batches(2)
    before = prepared_small("gpt2", tmp_path)
    with Session(seeded(GPT2.build), before, frugal(before)) as session:
        torch.manual_seed(SEED)
        session.step(batches[0], lr=LEARNING_RATE)
        generator, weights = torch.get_rng_state(), session.state_dict()
        with pytest.raises(DataError, match="Plan again with the larger size"):
            session.step(in_batches_of(4)[0])
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_tensors(session.state_dict(), weights)
        session.step(batches[1])
