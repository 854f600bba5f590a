"""Case 26 on one rank: of four experts two are idle; clipping takes one norm, idle ones are as in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stages.api import Session
from tests.cases.sessions import assert_same, frugal, placed, prepared, seeded, train, train_plainly

WIDTH = 16


class Experts(nn.Module):
    """Tokens go to the expert that the batch names; `forward` never calls the fourth one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        mixed = torch.zeros_like(x)
        for number in range(3):
            chosen = (expert == number).to(x.dtype).unsqueeze(-1)
            mixed = mixed + chosen * self.experts[number](x)
        return (self.head(torch.tanh(mixed)) - x).square().mean()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_idle_experts_and_the_norm_are_as_in_memory(precision: str, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    dtype = torch.float16 if precision == "fp16" else torch.float32
    batches = [
        {
            "x": torch.randn(4, WIDTH, generator=draw).to(dtype),
            "expert": torch.randint(0, 2, (4,), generator=draw),
        }
        for _ in range(3)
    ]
    model = seeded(Experts)
    idle = model.experts[3].weight.detach().clone()
    settings = {"precision": precision, "max_grad_norm": 0.1}
    before = placed(prepared(model, batches[0], **settings), tmp_path)
    with Session(model, before, frugal(before)) as session:
        found = train(session, batches, steps=8)
    expected = train_plainly(Experts, batches, steps=8, precision=precision, max_grad_norm=0.1)
    assert found.norms == expected.norms
    assert_same(found, expected)
    assert torch.equal(found.final["experts.3.weight"].float(), idle.to(dtype).float())
