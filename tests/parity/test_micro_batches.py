"""A batch in slices gives bitwise the numbers of the plain loop that accumulates over these slices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stages.artifacts.slicing import ORDERS
from tests import reference
from tests.models_for_tests import BY_NAME
from tests.parity import harness
from tests.parity.harness import ADVERSARIAL, LEAST, RESIDENT, REUSED_SLOTS, Variant
from tests.parity.test_parity import assert_equal

#: the short batch leaves slices of unequal size, the shortest one empty slices
ROWS = (4, 2, 3)
STEPS = {"fp32": 3, "bf16": 3, "fp16": 5}
#: dropout, encoder values read many times, a block used twice, three names for one weight
MODELS = ("gpt2", "t5", "mlp", "block_twice", "three_way_tie", "lstm", "late_reads", "partly_used")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(name: str) -> list[dict[str, Tensor]]:
    model = BY_NAME[name]
    return [model.batches(1, rows=rows, seed=seed)[0] for seed, rows in enumerate(ROWS)]


@cache
def expected(name: str, precision: str, micro_batches: int) -> reference.Result:
    return reference.train(
        BY_NAME[name].build,
        batches(name),
        precision=precision,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=STEPS[precision],
        seed=harness.SEED,
        micro_batches=micro_batches,
    )


def trained(
    name: str, variant: Variant, order: str, disk: Path, *, micro_batches: int, precision: str = "fp32"
) -> reference.Result:
    return harness.train(
        BY_NAME[name],
        precision,
        batches(name),
        variant,
        steps=STEPS[precision],
        disk=disk,
        micro_batches=micro_batches,
        order=order,
    )


@pytest.mark.parametrize("variant", [RESIDENT, LEAST, REUSED_SLOTS, ADVERSARIAL], ids=lambda one: one.name)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_bitwise_equal_to_accumulating_plainly(
    name: str, order: str, variant: Variant, tmp_path: Path
) -> None:
    assert_equal(trained(name, variant, order, tmp_path, micro_batches=4), expected(name, "fp32", 4))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("order", ORDERS)
def test_half_precision(precision: str, order: str, tmp_path: Path) -> None:
    found = trained("gpt2", ADVERSARIAL, order, tmp_path, micro_batches=2, precision=precision)
    assert_equal(found, expected("gpt2", precision, 2))


def test_slices_of_unequal_size(tmp_path: Path) -> None:
    found = trained("gpt2", LEAST, "vertical", tmp_path, micro_batches=3)
    assert_equal(found, expected("gpt2", "fp32", 3))


def test_unequal_numbers_of_targets_and_slices_without_any(tmp_path: Path) -> None:
    """Each slice counts with its targets; the model shifts labels, so that the first is none."""
    given = batches("gpt2")
    for batch in given:
        batch["labels"] = batch["labels"].clone()
        batch["labels"][0, 3:] = -100
        batch["labels"][1] = -100

    def targets(batch: dict[str, Tensor]) -> float:
        return int((batch["labels"][:, 1:] != -100).sum())

    plainly = reference.train(
        BY_NAME["gpt2"].build,
        given,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=3,
        seed=harness.SEED,
        micro_batches=4,
        weight_of=targets,
    )
    found = harness.train(
        BY_NAME["gpt2"], "fp32", given, LEAST, steps=3, disk=tmp_path, micro_batches=4, loss="token_mean",
    )  # fmt: skip
    assert_equal(found, plainly)
