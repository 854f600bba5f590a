"""Case 28: transfers at the last moment, or at random ones, and tensors dropped early."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from stages.api import Prepared, Session
from stages.runtime.transfers import Transfers
from tests import reference
from tests.cases.sessions import (
    SEED,
    assert_same,
    forced,
    frugal,
    placed,
    prepared,
    prepared_small,
    seeded,
    train_plainly,
)
from tests.models_for_tests import GPT2

REPEATS = 50
STEPS = 2
LONGEST_DELAY_S = 1e-3
BATCHES = GPT2.batches(STEPS)


def train_dropping(model: nn.Module, before: Prepared, plan: Any) -> reference.Result:
    """Lets go of model and batches as soon as it may."""
    result = reference.Result(losses=[], final={}, masters={}, rng_states=[])
    with Session(model, before, plan) as session:
        del model
        torch.manual_seed(SEED)
        for batch in BATCHES:
            copy = {name: tensor.clone() for name, tensor in batch.items()}
            done = session.step_in_full(copy)
            del copy
            result.losses.append(done.loss)
            result.norms.append(done.grad_norm)
            result.rng_states.append(torch.get_rng_state())
        result.final = session.state_dict()
    return result


@cache
def synchronous() -> reference.Result:
    """Each transfer waited for: the same model by solver greedy_sync and the usual lanes."""
    before = prepared(seeded(GPT2.build), BATCHES[0], solver="greedy_sync")
    return train_dropping(seeded(GPT2.build), before, frugal(before))


def test_the_synchronous_run_is_the_plain_loop() -> None:
    assert_same(synchronous(), train_plainly(GPT2.build, BATCHES, STEPS))


@pytest.mark.parametrize("activations", ["recompute", "move"])
def test_the_last_moment_is_early_enough(activations: str, tmp_path: Path) -> None:
    before = prepared_small("gpt2", tmp_path, "adversarial")
    plan = forced(before, activations)
    for _ in range(REPEATS // 2):
        assert_same(train_dropping(seeded(GPT2.build), before, plan), synchronous())


@contextmanager
def random_delays(seed: int) -> Iterator[None]:
    """Each transfer starts up to a millisecond late, in its own thread."""
    perform = Transfers.perform
    delays = random.Random(seed)

    def late(self: Transfers, *args: Any) -> int:
        time.sleep(delays.uniform(0, LONGEST_DELAY_S))
        return perform(self, *args)

    with mock.patch.object(Transfers, "perform", late):
        yield


def test_any_moment_in_between_is_right(tmp_path: Path) -> None:
    before = prepared_small("gpt2", tmp_path)
    for seed, plan in enumerate(forced(before, way) for way in ("recompute", "move", "keep")):
        for repeat in range(4):
            with random_delays(10 * seed + repeat):
                assert_same(train_dropping(seeded(GPT2.build), before, plan), synchronous())


def test_prefetching_plans_are_right_too(tmp_path: Path) -> None:
    """With room to fetch ahead, transfers overlap more of the step."""
    before = placed(prepared_small("gpt2", tmp_path), tmp_path)
    regions = len(before.graph.regions)
    for lead in (1, 2):
        plan = forced(before, "recompute", prefetch=[lead] * regions, chunk_slots=3)
        for seed in range(4):
            with random_delays(seed):
                assert_same(train_dropping(seeded(GPT2.build), before, plan), synchronous())
