"""Case 10: a used, an unused and a frozen Linear in one region."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Prepared, Session
from tests.cases.sessions import (
    assert_same,
    frugal,
    placed,
    prepared,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import WIDTH, TokenModel, tokens

UNUSED, FROZEN, USED = "blocks.0.unused.weight", "blocks.0.frozen.weight", "blocks.0.used.weight"


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(torch.tanh(self.used(x)))


class PartlyTrained(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixed() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches(count: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [tokens(generator, 2) for _ in range(count)]


@cache
def traced(precision: str) -> Prepared:
    return prepared(seeded(PartlyTrained), batches(1)[0], precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_only_the_used_layer_moves(precision: str, tmp_path: Path) -> None:
    before = placed(traced(precision), tmp_path)
    with Session(seeded(PartlyTrained), before, frugal(before)) as session:
        found = train(session, batches())
    expected = train_plainly(PartlyTrained, batches(), precision=precision)
    assert_same(found, expected)
    initial = seeded(PartlyTrained).state_dict()
    for name in (UNUSED, FROZEN):  # AdamW decays by default: an update without gradient would show
        assert torch.equal(found.final[name], initial[name].to(found.final[name].dtype)), name
    assert not torch.equal(found.final[USED], initial[USED].to(found.final[USED].dtype))


def test_the_layers_share_a_region() -> None:
    graph = traced("fp32").graph
    assert any({USED, FROZEN} <= set(region.parameters) for region in graph.regions)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_no_memory_is_kept_for_what_is_not_trained(precision: str, tmp_path: Path) -> None:
    plan = frugal(placed(traced(precision), tmp_path))
    roles = {
        name: {buffer.role for buffer in plan.buffers if buffer.owner == name}
        for name in (USED, UNUSED, FROZEN)
    }
    assert roles[FROZEN] == {"weight"}
    assert roles[UNUSED] == {"weight"}
    assert {"weight", "state", "gradient"} <= roles[USED]
