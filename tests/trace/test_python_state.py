"""A forward whose result depends on state in Python is refused: a trace would freeze it."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stages.artifacts.errors import TraceError
from stages.trace.stage import trace_module

HERE = re.escape(str(Path(__file__)))


class Stateful(nn.Module):
    """A linear layer, and attributes of several kinds that subclasses change in forward."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self.calls = 0
        self.log: list[int] = []
        self.last: Any = None
        self.average = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.linear(x)).sum()

    def change(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class Counts(Stateful):
    def change(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y / self.calls


class Logs(Stateful):
    def change(self, y: Tensor) -> Tensor:
        self.log.append(1)
        return y * len(self.log)


class Remembers(Stateful):
    def change(self, y: Tensor) -> Tensor:
        y = y if self.last is None else y + self.last
        self.last = y.detach()
        return y


class Averages(Stateful):
    def change(self, y: Tensor) -> Tensor:
        self.average = 0.9 * self.average + y.detach().mean(0)
        return y - self.average


class AssignsBuffer(Stateful):
    def change(self, y: Tensor) -> Tensor:
        self.table = 0.9 * self.table + y.detach().mean(0)
        return y - self.table


class DrawsInPython(Stateful):
    def change(self, y: Tensor) -> Tensor:
        return y * random.random()


class DrawsInNumpy(Stateful):
    def change(self, y: Tensor) -> Tensor:
        return y * float(np.random.rand())


class WritesBeforeReading(Stateful):
    def change(self, y: Tensor) -> Tensor:
        self.last = y.mean()
        self.table.mul_(0.9).add_(y.detach().mean(0))
        return y + self.last


@pytest.mark.parametrize(
    ("model", "name"),
    [(Counts, "calls"), (Remembers, "last"), (Averages, "average"), (AssignsBuffer, "table")],
)
def test_an_assigned_attribute_is_refused_with_file_and_line(model: type[Stateful], name: str) -> None:
    with pytest.raises(TraceError, match=rf"{HERE}:\d+: .*'{model.__name__}'.*'{name}'"):
        trace_module(model(), (torch.randn(3, 4),))


def test_an_attribute_that_grows_is_refused_by_name() -> None:
    with pytest.raises(TraceError, match="'log'"):
        trace_module(Logs(), (torch.randn(3, 4),))


@pytest.mark.parametrize(("model", "name"), [(DrawsInPython, "Python"), (DrawsInNumpy, "NumPy")])
def test_random_numbers_that_are_not_torchs_are_refused(model: type[Stateful], name: str) -> None:
    with pytest.raises(TraceError, match=f"draws from {name}'s random numbers"):
        trace_module(model(), (torch.randn(3, 4),))


def test_what_carries_nothing_from_step_to_step_is_traced() -> None:
    trace_module(WritesBeforeReading(), (torch.randn(3, 4),))
