"""Case 3: masks and labels train; what cannot be traced is refused at the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Session
from stages.artifacts.errors import TraceError
from tests.cases.sessions import assert_same, frugal, prepared, seeded, train, train_plainly
from tests.models_for_tests import BERT, GPT2, VOCABULARY, SmallModel

IGNORED = -100


def padded(model: SmallModel, count: int) -> list[dict[str, Tensor]]:
    """Rows of unequal length: the mask is 0 and the label ignored past each one's end."""
    batches = model.batches(count)
    for number, batch in enumerate(batches):
        mask = torch.ones_like(batch["input_ids"])
        for row in range(len(mask)):
            mask[row, mask.shape[1] - 3 - 4 * row - number :] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
    return batches


@pytest.mark.parametrize(
    ("model", "precision"),
    [(GPT2, "fp32"), (GPT2, "bf16"), (BERT, "fp32")],
    ids=lambda part: getattr(part, "name", part),
)
def test_labels_and_attention_mask_train(model: SmallModel, precision: str, tmp_path: Path) -> None:
    batches = padded(model, 3)
    built = seeded(model.build)
    before = prepared(built, batches[0], precision=precision, disk=str(tmp_path))
    with Session(built, before, frugal(before)) as session:
        found = train(session, batches)
    assert_same(found, train_plainly(model.build, batches, precision=precision))


def test_a_full_mask_is_as_good_as_none(tmp_path: Path) -> None:
    """Planned with padding; a batch without any must not take another branch."""
    batches = padded(GPT2, 2)
    batches[1]["attention_mask"] = torch.ones_like(batches[1]["attention_mask"])
    built = seeded(GPT2.build)
    before = prepared(built, batches[0], disk=str(tmp_path))
    with Session(built, before, frugal(before)) as session:
        found = train(session, batches, steps=4)
    assert_same(found, train_plainly(GPT2.build, batches, steps=4))


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def asks_for_a_number(x: Tensor) -> Tensor:
    return x * max(x.mean().item(), 1.0)


def leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy()) * x


def picks_by_value(x: Tensor) -> Tensor:
    return x[x > 0].sum() * x


def raises(x: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


class Strange(nn.Module):
    def __init__(self, strange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.strange = strange

    def forward(self, x: Tensor) -> Tensor:
        return self.strange(self.linear(x))


class Outer(nn.Module):
    def __init__(self, strange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.blocks = nn.ModuleList([Strange(torch.tanh), Strange(strange)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return x.mean()


def lines_of(function: Callable[..., Tensor]) -> list[str]:
    lines, first = inspect.getsourcelines(function)
    return [f"{Path(__file__).name}:{first + offset}" for offset in range(1, len(lines))]


@pytest.mark.parametrize(
    "strange", [branches, asks_for_a_number, leaves_torch, picks_by_value, raises], ids=lambda f: f.__name__
)
def test_what_cannot_be_traced_is_refused_with_module_file_and_line(
    strange: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(TraceError) as refusal:
        prepared(Outer(strange), {"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
    message = str(refusal.value)
    assert "'blocks.1'" in message
    # the operation itself, or the line of forward from which it is reached
    assert any(place in message for place in (*lines_of(strange), *lines_of(Strange.forward))), message


def test_the_message_of_the_users_own_error_is_kept() -> None:
    with pytest.raises(TraceError, match="RuntimeError: no such thing"):
        prepared(Outer(raises), {"input_ids": torch.zeros(2, 8, dtype=torch.int64)})
