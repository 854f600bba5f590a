"""Clipping to one norm over all tiers, and steps without an update: bitwise as in the plain loop."""

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

MAX_NORM = 0.1
STEPS = 4
VARIANTS = (RESIDENT, LEAST, REUSED_SLOTS, ADVERSARIAL, AUTO)
#: a scale at which the small models do not overflow, and that grows in between
SCALE = {"initial": 2.0**8, "growth_interval": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def _expected(name: str, precision: str) -> reference.Result:
    model = BY_NAME[name]
    return reference.train(
        model.build,
        model.batches(2),
        precision=precision,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=STEPS,
        seed=harness.SEED,
        max_grad_norm=MAX_NORM,
        scale=reference.LossScale(value=SCALE["initial"], interval=2),
    )


def _cases() -> Iterator[object]:
    """Every model and precision under two variants; under the others, slowly."""
    models = [(name, precision) for name in ("gpt2", "odd_mlp") for precision in ("fp32", "bf16", "fp16")]
    models += [("three_way_tie", "bf16"), ("t5", "fp32"), ("partly_used", "fp32")]
    for number, (name, precision) in enumerate(models):
        for variant in VARIANTS:
            quick = variant.name in ("least" if name == "gpt2" else "adversarial", VARIANTS[number % 5].name)
            marks = () if quick else (pytest.mark.slow,)
            yield pytest.param(name, precision, variant, id=f"{name}-{precision}-{variant.name}", marks=marks)


@pytest.mark.parametrize(("name", "precision", "variant"), list(_cases()))
def test_clipped_runs_equal_the_plain_loop(
    name: str, precision: str, variant: Variant, tmp_path: Path
) -> None:
    model, expected = BY_NAME[name], _expected(name, precision)
    assert max(norm or 0.0 for norm in expected.norms) > MAX_NORM, "nothing was clipped"
    found = harness.train(
        model,
        precision,
        model.batches(2),
        variant,
        steps=STEPS,
        disk=tmp_path,
        rules=TrainConfig(max_grad_norm=MAX_NORM),
        loss_scale=LossScaleConfig(**SCALE),  # type: ignore[arg-type]
    )
    assert found.norms == expected.norms
    assert precision != "fp16" or found.scales == expected.scales
    assert_equal(found, expected)
