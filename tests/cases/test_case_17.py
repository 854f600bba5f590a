"""Case 17: running statistics under recomputation. They move once per step, and keep their dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.api import Session
from tests.cases.sessions import (
    assert_same,
    forced,
    placed,
    prepared,
    prepared_small,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import BY_NAME, images

STEPS = 3


class TwiceNormalised(nn.Module):
    """PyTorch's own batch norm: its kernels and its integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
            for channels in (3, 8)
        )
        self.head = nn.Linear(8, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            pixels = block(pixels)
        scores = self.head(pixels.mean((2, 3)))
        return scores, functional.cross_entropy(scores, labels)


def check_buffers(final: dict[str, Tensor]) -> None:
    counters = {name: tensor for name, tensor in final.items() if name.endswith("num_batches_tracked")}
    assert len(counters) == 2
    for name, counter in counters.items():
        assert counter.dtype == torch.int64, name
        assert int(counter) == STEPS, name
    statistics = {name: tensor for name, tensor in final.items() if ".running_" in name}
    assert len(statistics) == 4
    for name, tensor in statistics.items():
        assert tensor.dtype == torch.float32, name


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_batch_norm_recomputed(lane: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(7)
    batches = [images(generator, 2) for _ in range(STEPS)]
    model = seeded(TwiceNormalised)
    before = prepared(model, batches[0], lane=lane, disk=str(tmp_path))
    with Session(model, before, forced(before, "recompute")) as session:
        found = train(session, batches, STEPS)
    assert_same(found, train_plainly(TwiceNormalised, batches, STEPS))
    check_buffers(found.final)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_buffers_keep_their_dtypes_in_16_bit(precision: str, tmp_path: Path) -> None:
    model = BY_NAME["conv_bn"]
    batches = model.batches(STEPS)
    before = prepared_small("conv_bn", tmp_path, precision=precision)
    with Session(seeded(model.build), before, forced(before, "recompute")) as session:
        found = train(session, batches, STEPS)
    assert_same(found, train_plainly(model.build, batches, STEPS, precision))
    check_buffers(found.final)


def test_other_choices_give_the_same_statistics(tmp_path: Path) -> None:
    model = BY_NAME["conv_bn"]
    batches = model.batches(STEPS)
    before = placed(prepared_small("conv_bn", tmp_path), tmp_path, "adversarial")
    expected = train_plainly(model.build, batches, STEPS)
    for activations in ("keep", "move", "recompute"):
        with Session(seeded(model.build), before, forced(before, activations)) as session:
            assert_same(train(session, batches, STEPS), expected)
