"""The reference itself: what it imports, and the meaning of its precisions."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from tests import reference
from tests.models_for_tests import BY_NAME, MODELS, SmallModel


class _Scaled(nn.Module):
    """Loss is `factor` times the mean of a Linear's output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return (self.linear(x.to(self.linear.weight.dtype)).float() * factor).mean()


def _batch(factor: float) -> dict[str, Tensor]:
    return {"x": torch.ones(2, 4), "factor": torch.tensor(factor)}


def test_imports_nothing_from_stages() -> None:
    code = (
        "import sys, tests.reference, tests.models_for_tests\n"
        "print([name for name in sys.modules if name.startswith('stages')])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_small_models_train_and_draw_the_same_numbers_again(model: SmallModel) -> None:
    first, second = (reference.train(model.build, model.batches(2), steps=3) for _ in range(2))
    assert first.losses == second.losses
    assert len(set(first.losses)) == 3
    assert all(torch.equal(first.final[name], second.final[name]) for name in first.final)


def test_masters_start_from_the_weights_before_the_cast() -> None:
    model = BY_NAME["odd_mlp"]
    torch.manual_seed(0)
    original = model.build().state_dict()
    frozen = reference.train(
        model.build, model.batches(1), precision="bf16", optimizer=reference.adamw(lr=0.0), steps=1
    )
    assert all(torch.equal(frozen.masters[name], original[name]) for name in original)
    assert all(torch.equal(frozen.final[name], original[name].bfloat16()) for name in original)


def test_an_overflow_skips_the_step_and_only_the_second_lowers_the_scale() -> None:
    batches = [_batch(1.0), _batch(float("inf")), _batch(1.0)]
    result = reference.train(_Scaled, batches, precision="fp16", steps=3, keep_gradients=True)
    without = reference.train(_Scaled, [batches[0], batches[2]], precision="fp16", steps=2)
    assert result.skipped_steps == [2]
    assert all(torch.equal(result.masters[name], without.masters[name]) for name in result.masters)


def test_loss_scale_grows_after_the_interval_and_stays_in_its_bounds() -> None:
    scale = reference.LossScale(value=8.0, interval=2, maximum=16.0)
    scale.update(overflow=True)
    assert scale.value == 8.0
    scale.update(overflow=True)
    scale.update(overflow=True)
    assert scale.value == 2.0
    for _ in range(8):
        scale.update(overflow=False)
    assert scale.value == 16.0
    for _ in range(10):
        scale.update(overflow=True)
    assert scale.value == 1.0


def test_buffers_keep_their_dtype_and_frozen_parameters_have_no_master() -> None:
    model = BY_NAME["conv_bn"]
    result = reference.train(model.build, model.batches(2), precision="bf16", steps=2)
    assert result.final["blocks.0.norm.running_mean"].dtype == torch.float32
    assert int(result.final["blocks.0.norm.num_batches_tracked"]) == 2
    partly = BY_NAME["partly_used"]
    trained = reference.train(partly.build, partly.batches(1), precision="bf16", steps=1)
    assert "frozen.weight" not in trained.masters
    assert trained.final["frozen.weight"].dtype == torch.bfloat16
