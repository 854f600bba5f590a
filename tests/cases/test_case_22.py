"""Case 22: what a session took comes back when it is closed, and the next one works."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Prepared, Session
from stages.artifacts.errors import ConfigError, StageError
from stages.artifacts.plan import Plan
from stages.region import memory
from tests.cases.sessions import (
    AMPLE,
    assert_same,
    frugal,
    prepared,
    seeded,
    train,
    train_plainly,
)

STEPS = 2
WIDTH = 1024
LAYERS = 4
#: weights, gradients and two moments of the whole model
STATE_BYTES = 4 * 4 * LAYERS * WIDTH * WIDTH
TOLERANCE_BYTES = 4 * 10**6


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


BATCHES = [{"x": torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))}]


def resident_bytes() -> int:
    gc.collect()
    memory.trim()
    return memory.resident_bytes()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def two_steps(model: nn.Module, before: Prepared, plan: Plan) -> int:
    """Resident bytes while the session is open."""
    with Session(model, before, plan) as session:
        for _ in range(STEPS):
            session.step(BATCHES[0])
        return resident_bytes()


@pytest.mark.parametrize("plan_of", [lambda before: before.plan(AMPLE), frugal], ids=["resident", "streamed"])
def test_memory_threads_and_files_come_back(plan_of: Callable[[Prepared], Plan], tmp_path: Path) -> None:
    model = seeded(Deep)
    before = prepared(model, BATCHES[0], disk=str(tmp_path))
    plan = plan_of(before)
    two_steps(model, before, plan)  # libraries load and keep what they need for good
    resident, threads, files = resident_bytes(), threading.active_count(), open_files()
    open_bytes = two_steps(model, before, plan)
    assert resident_bytes() - resident < TOLERANCE_BYTES
    if plan.arena_bytes > STATE_BYTES // 2:
        assert open_bytes - resident > STATE_BYTES // 2, "the session held nothing that could come back"
    assert threading.active_count() == threads
    assert open_files() == files
    assert list(tmp_path.rglob("*")) == []


def test_a_second_session_starts_anew(tmp_path: Path) -> None:
    model = seeded(Deep)
    before = prepared(model, BATCHES[0], disk=str(tmp_path))
    expected = train_plainly(Deep, BATCHES, STEPS)
    for _ in range(2):
        with Session(model, before, frugal(before)) as session:
            assert_same(train(session, BATCHES, STEPS), expected)


def test_everything_comes_back_after_a_failure_too(tmp_path: Path) -> None:
    model = seeded(Deep)
    before = prepared(model, BATCHES[0], disk=str(tmp_path))
    threads = threading.active_count()
    plan = frugal(before)

    def fail() -> None:
        with Session(model, before, plan) as session:
            session.step(BATCHES[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ConfigError, match="Give the model that was planned"):
        Session(nn.Linear(1, 1), before, plan)
    gc.collect()
    assert threading.active_count() == threads
    assert list(tmp_path.rglob("*")) == []


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    model = seeded(Deep)
    before = prepared(model, BATCHES[0], disk=str(tmp_path))
    session = Session(model, before, frugal(before))
    session.close()
    session.close()
    for use in (lambda: session.step(BATCHES[0]), session.state_dict, lambda: session.save(tmp_path)):
        with pytest.raises(StageError, match="the session is closed"):
            use()
