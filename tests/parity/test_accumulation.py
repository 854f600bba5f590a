"""Several batches a step: bitwise the plain loop that calls `(loss / K).backward()` K times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from stages.config import LossScaleConfig, TrainConfig
from tests import reference
from tests.models_for_tests import BY_NAME
from tests.parity import harness
from tests.parity.harness import ADVERSARIAL, AUTO, LEAST, RESIDENT, REUSED_SLOTS, Variant
from tests.parity.test_parity import assert_equal

STEPS = 3
#: of unlike sizes; three batches a step, so that a third is no power of two
ROWS = (2, 1, 2)
ACCUMULATE = 3
VARIANTS = (LEAST, ADVERSARIAL, REUSED_SLOTS, RESIDENT, AUTO)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def _batches(name: str) -> list[dict[str, torch.Tensor]]:
    return [BY_NAME[name].batches(1, rows=rows, seed=seed)[0] for seed, rows in enumerate(ROWS)]


@cache
def _expected(name: str, precision: str, micro_batches: int, max_norm: float) -> reference.Result:
    return reference.train(
        BY_NAME[name].build,
        _batches(name),
        precision=precision,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=STEPS,
        seed=harness.SEED,
        micro_batches=micro_batches,
        accumulate=ACCUMULATE,
        max_grad_norm=max_norm,
        scale=reference.LossScale(value=2.0**8),
    )


def _cases() -> Iterator[object]:
    """Every model under two variants, the others slowly."""
    models = [("gpt2", precision, 1, 0.0) for precision in ("fp32", "bf16", "fp16")]
    models += [("odd_mlp", "fp32", 1, 0.0), ("three_way_tie", "bf16", 1, 0.1), ("t5", "fp32", 1, 0.0)]
    models += [("gpt2", "fp16", 2, 0.1), ("three_way_tie", "fp32", 2, 0.0), ("partly_used", "fp32", 1, 0.1)]
    for number, (name, precision, micro, norm) in enumerate(models):
        for variant in VARIANTS:
            quick = variant in (ADVERSARIAL, VARIANTS[number % 5])
            marks = () if quick else (pytest.mark.slow,)
            case = f"{name}-{precision}-{micro}-{norm}-{variant.name}"
            yield pytest.param(name, precision, micro, norm, variant, id=case, marks=marks)


@pytest.mark.parametrize(("name", "precision", "micro_batches", "max_norm", "variant"), list(_cases()))
def test_gradients_of_several_batches_add_up_as_in_the_plain_loop(
    name: str, precision: str, micro_batches: int, max_norm: float, variant: Variant, tmp_path: Path
) -> None:
    expected = _expected(name, precision, micro_batches, max_norm)
    found = harness.train(
        BY_NAME[name],
        precision,
        _batches(name),
        variant,
        steps=STEPS,
        disk=tmp_path,
        micro_batches=micro_batches,
        rules=TrainConfig(accumulate=ACCUMULATE, max_grad_norm=max_norm),
        loss_scale=LossScaleConfig(initial=2.0**8),
    )
    assert found.norms == expected.norms or not max_norm
    assert_equal(found, expected)
