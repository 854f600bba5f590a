"""Case 24: a layer that runs only if a flag says so; the flag alternates from step to step."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Session
from stages.artifacts.errors import DataError, TraceError
from tests.cases.sessions import assert_same, frugal, prepared, seeded, train, train_plainly
from tests.models_for_tests import WIDTH


class Branching(nn.Module):
    """fc1, fc2 only if `flag`, fc3."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, WIDTH)
        self.fc2 = nn.Linear(WIDTH, WIDTH)
        self.fc3 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, flag: Tensor | bool) -> Tensor:
        x = torch.tanh(self.fc1(x))
        if flag:
            x = torch.tanh(self.fc2(x))
        return (self.fc3(x) ** 2).mean()


class Chosen(Branching):
    """The same choice without a branch."""

    def forward(self, x: Tensor, flag: Tensor | bool) -> Tensor:
        x = torch.tanh(self.fc1(x))
        x = torch.where(torch.as_tensor(flag), torch.tanh(self.fc2(x)), x)
        return (self.fc3(x) ** 2).mean()


def batches(flags: list[object]) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(7)
    return [{"x": torch.randn(4, WIDTH, generator=generator), "flag": flag} for flag in flags]


def line_of_the_branch() -> int:
    lines, first = inspect.getsourcelines(Branching)
    return first + next(number for number, line in enumerate(lines) if line.strip() == "if flag:")


def test_a_branch_on_a_tensor_is_refused_at_trace_with_its_module_file_and_line() -> None:
    with pytest.raises(TraceError) as refusal:
        prepared(Branching(), batches([torch.tensor(True)])[0])
    message = str(refusal.value)
    assert f"{Path(__file__).name}:{line_of_the_branch()}" in message
    assert "'Branching'" in message
    assert "branches on" in message
    assert "torch.where" in message
    assert "if flag:" in message


@pytest.mark.parametrize("flag", [True, False])
def test_a_flag_that_is_no_tensor_holds_for_the_session(flag: bool, tmp_path: Path) -> None:
    """Which branch is planned depends on the flag; a batch with another is refused before its step."""
    model = seeded(Branching)
    before = prepared(model, batches([flag])[0], disk=str(tmp_path))
    with Session(model, before, frugal(before)) as session:
        found = train(session, batches([flag, flag]), steps=6)
        with pytest.raises(DataError, match="flag"):
            session.step(batches([not flag])[0])
        assert torch.equal(session.state_dict()["fc1.weight"], found.final["fc1.weight"])
    assert_same(found, train_plainly(Branching, batches([flag, flag]), steps=6))
    untouched = seeded(Branching).state_dict()["fc2.weight"]
    assert torch.equal(found.final["fc2.weight"], untouched) != flag, "no decay where there is no gradient"


def test_the_same_choice_by_where_follows_the_alternating_flag(tmp_path: Path) -> None:
    alternating = batches([torch.tensor(True), torch.tensor(False)])
    model = seeded(Chosen)
    before = prepared(model, alternating[0], disk=str(tmp_path))
    with Session(model, before, frugal(before)) as session:
        found = train(session, alternating)
    assert_same(found, train_plainly(Chosen, alternating))
