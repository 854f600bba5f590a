"""Case 29: optional and nested inputs, a dataclass as output, keys in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import stages
from stages.api import Session
from stages.artifacts.errors import DataError, StageError
from tests.cases.sessions import (
    AMPLE,
    LEARNING_RATE,
    SEED,
    STEPS,
    assert_same,
    assert_same_tensors,
    frugal,
    prepared,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import BATCH, BY_NAME, LENGTH, WIDTH, Structured

Make = Callable[[Tensor, Tensor], Any]


def batches(make: Make, count: int = 3) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(count):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        found.append(make(x, torch.rand(BATCH, LENGTH, generator=generator) > 0.3))
    return found


#: the planned call, and the same call by other means
CALLS: dict[str, tuple[Make, Make]] = {
    "defaults": (lambda x, mask: {"x": x}, lambda x, mask: [x]),
    "explicit defaults": (lambda x, mask: {"x": x}, lambda x, mask: (x, None, {"scale": 2})),
    "mask": (lambda x, mask: {"x": x, "mask": mask}, lambda x, mask: {"mask": mask, "x": x}),
    "all": (
        lambda x, mask: {"x": x, "mask": mask, "opts": {"scale": 3, "unused": "a"}},
        lambda x, mask: {"opts": {"unused": "a", "scale": 3}, "mask": mask, "x": x},
    ),
    "positional": (lambda x, mask: (x, mask, {"scale": 3}), lambda x, mask: [x, mask, {"scale": 3}]),
    "position to keyword": (lambda x, mask: [x, mask], lambda x, mask: {"mask": mask, "x": x}),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_way_to_call_it_trains(name: str, tmp_path: Path) -> None:
    planned, shuffled = CALLS[name]
    model = seeded(Structured)
    before = prepared(model, batches(planned)[0], disk=str(tmp_path))
    expected = train_plainly(Structured, batches(planned))
    for make in (planned, shuffled):
        with Session(seeded(Structured), before, frugal(before)) as session:
            assert_same(train(session, batches(make)), expected)


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    weight: float = 0.5


class Nested(nn.Module):
    """Tensors in a dict of lists, in a dataclass and in keyword arguments without a name of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, parts: dict[str, list[Tensor]], pair: Pair, **more: Tensor) -> dict[str, Any]:
        x = self.first(parts["tokens"][0] + parts["tokens"][1])
        y = self.second(pair.left * pair.weight + pair.right)
        return {"parts": [x, (y,)], "loss": ((x - y) ** 2).mean() + (x * more["bias"]).mean()}


def nested(x: Tensor, mask: Tensor) -> dict[str, Any]:
    del mask
    return {"parts": {"tokens": [x, 2 * x]}, "pair": Pair(x + 1, x - 1), "bias": x[..., :1]}


def nested_shuffled(x: Tensor, mask: Tensor) -> dict[str, Any]:
    made = nested(x, mask)
    return {key: made[key] for key in ("bias", "pair", "parts")}


def test_nested_inputs_train(tmp_path: Path) -> None:
    model = seeded(Nested)
    before = prepared(model, batches(nested)[0], disk=str(tmp_path))
    expected = train_plainly(Nested, batches(nested))
    for make in (nested, nested_shuffled):
        with Session(seeded(Nested), before, frugal(before)) as session:
            assert_same(train(session, batches(make)), expected)


def test_the_public_entry_trains_it(tmp_path: Path) -> None:
    """`stages.offload` as documented, with this machine's own measurements."""
    make, _ = CALLS["all"]
    with stages.offload(
        seeded(Structured), batches(make)[0], AMPLE, lr=LEARNING_RATE, disk=str(tmp_path)
    ) as session:
        found = train(session, batches(make))
    assert_same(found, train_plainly(Structured, batches(make)))
    fresh = Structured()
    fresh.load_state_dict(found.final, strict=True)
    assert len(found.losses) == STEPS


#: what differs from the planned call {"x", "mask": None, "opts": {"scale": 2}}, and what is named
REFUSED: dict[str, tuple[Make, str]] = {
    "another scale": (lambda x, mask: {"x": x, "opts": {"scale": 3}}, r"3 at opts\.scale.*had 2"),
    "another type": (lambda x, mask: {"x": x, "opts": {"scale": 2.0}}, r"2\.0 at opts\.scale.*had 2"),
    "a boolean": (lambda x, mask: {"x": x, "opts": {"scale": True}}, r"True at opts\.scale"),
    "a tensor for a number": (
        lambda x, mask: {"x": x, "opts": {"scale": torch.tensor(2)}},
        r"a tensor at opts\.scale",
    ),
    "an option more": (lambda x, mask: {"x": x, "opts": {"scale": 2, "shift": 1}}, r"1 at opts\.shift"),
    "an option less": (lambda x, mask: {"x": x, "opts": {}}, r"nothing at opts\.scale"),
    "a mask": (lambda x, mask: {"x": x, "mask": mask}, r"a tensor at mask.*had None"),
    "no tensor": (lambda x, mask: {"x": None}, r"None at x.*had a tensor"),
    "a list": (lambda x, mask: {"x": x.tolist()}, r"nothing at x.*had a tensor"),
    "an unknown argument": (lambda x, mask: {"x": x, "masks": mask}, r"unexpected keyword argument 'masks'"),
    "no argument": (lambda x, mask: {}, r"missing a required argument: 'x'"),
    "a bare tensor": (lambda x, mask: x, r"a Tensor; expected keyword arguments"),
    "another dtype": (lambda x, mask: {"x": x.double()}, r"torch\.float64"),
    "another width": (lambda x, mask: {"x": x[..., :3]}, r"shape"),
}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    make, _ = CALLS["defaults"]
    before = prepared(seeded(Structured), batches(make)[0], disk=str(tmp_path_factory.mktemp("disk")))
    return before, frugal(before)


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_from_the_trace_is_refused_and_nothing_changes(name: str, planned: Any) -> None:
    make, match = REFUSED[name]
    with Session(seeded(Structured), *planned) as session:
        torch.manual_seed(SEED)
        generator, weights = torch.get_rng_state(), session.state_dict()
        with pytest.raises(DataError, match=match):
            session.step(batches(make)[0])
        assert torch.equal(torch.get_rng_state(), generator)
        assert_same_tensors(session.state_dict(), weights)


def test_an_array_that_is_no_tensor_is_refused_when_planned() -> None:
    x = numpy.zeros((BATCH, LENGTH, WIDTH), dtype=numpy.float32)
    with pytest.raises(StageError, match=r"torch\.as_tensor"):
        prepared(seeded(Structured), {"x": torch.from_numpy(x), "opts": {"scale": numpy.ones(1)}})


def test_a_model_of_the_usual_kind_takes_positions_too(tmp_path: Path) -> None:
    """Planned by keyword, fed by position where forward's order says so."""
    model = BY_NAME["mlp"]
    before = prepared_small("mlp", tmp_path)
    by_keyword = model.batches(2)
    by_position = [(batch["input_ids"], batch["labels"]) for batch in by_keyword]
    with Session(seeded(model.build), before, frugal(before)) as session:
        assert_same(train(session, by_position, 4), train_plainly(model.build, by_keyword, 4))
