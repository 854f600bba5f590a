"""Every small model, planned in every way, gives bitwise the numbers of the plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from stages.artifacts.errors import TraceError
from tests import reference
from tests.models_for_tests import BY_NAME, MODELS, SmallModel
from tests.parity import harness
from tests.parity.harness import AUTO, READ_AHEAD, RESIDENT, VARIANTS, Variant

#: a short batch between full ones: the same plan must hold for it
ROWS = (2, 1, 2)
#: fp16 skips its first steps while the loss scale falls; some must be left that update
STEPS = {"fp32": 3, "bf16": 3, "fp16": 5}

#: models in all precisions; the others differ from these in ways that a dtype does not touch
IN_ALL_PRECISIONS = (
    "gpt2", "llama", "bert", "t5", "lstm", "conv_bn", "block_twice", "three_way_tie", "low_rank",
)  # fmt: skip

#: models of unlike structure, with a weight that is read in several places and one of odd length
READ_AHEAD_CASES = (
    ("gpt2", "fp32"), ("gpt2", "bf16"), ("gpt2", "fp16"), ("t5", "fp32"), ("odd_mlp", "fp32"),
    ("odd_mlp", "bf16"), ("odd_mlp", "fp16"), ("three_way_tie", "bf16"),
)  # fmt: skip


def _cases() -> Iterator[tuple[str, str, Variant]]:
    for model in MODELS:
        if model.refused:
            continue
        for precision in STEPS if model.name in IN_ALL_PRECISIONS else ("fp32",):
            for variant in VARIANTS:
                yield model.name, precision, variant
    for name, precision in READ_AHEAD_CASES:
        for variant in (READ_AHEAD, AUTO):
            yield name, precision, variant


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread: tensors here are too small for two to do anything but wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", 1))
    yield
    torch.set_num_threads(before)


def _batches(model: SmallModel) -> list[dict[str, torch.Tensor]]:
    return [model.batches(1, rows=rows, seed=seed)[0] for seed, rows in enumerate(ROWS)]


@cache
def _reference(name: str, precision: str) -> reference.Result:
    model = BY_NAME[name]
    return reference.train(
        model.build,
        _batches(model),
        precision=precision,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=STEPS[precision],
        seed=harness.SEED,
    )


def assert_equal(found: reference.Result, expected: reference.Result) -> None:
    assert found.losses == expected.losses
    assert found.skipped_steps == expected.skipped_steps
    for step, (state, reference_state) in enumerate(
        zip(found.rng_states, expected.rng_states, strict=True), start=1
    ):
        assert torch.equal(state, reference_state), f"the generator differs after step {step}"
    missing = set(expected.final) - set(found.final)
    assert not missing, f"no final value of {sorted(missing)}"
    for name, tensor in expected.final.items():
        assert found.final[name].dtype == tensor.dtype, name
        different = int((found.final[name] != tensor).sum())
        assert torch.equal(found.final[name], tensor), f"{different} of {tensor.numel()} differ in {name}"


@pytest.mark.parametrize(
    ("name", "precision", "variant"), list(_cases()), ids=lambda part: getattr(part, "name", part)
)
def test_bitwise_equal_to_the_plain_loop(name: str, precision: str, variant: Variant, tmp_path: Path) -> None:
    model = BY_NAME[name]
    expected = _reference(name, precision)
    assert len(expected.skipped_steps) < STEPS[precision], "nothing was trained"
    found = harness.train(model, precision, _batches(model), variant, steps=STEPS[precision], disk=tmp_path)
    assert_equal(found, expected)


@pytest.mark.parametrize("name", ["gpt2", "odd_mlp"])
def test_plans_that_read_ahead_use_all_that_placements_offer(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    graph, costs = harness.traced(model, "fp32", 2)
    config = harness.config_of(model, "fp32", rows=2, solver="milp", disk=tmp_path)
    placement = harness.plan_of(config, graph, costs, READ_AHEAD).placement
    assert placement.moving_bytes > 0
    assert placement.hold > 0
    assert placement.resident_elements
    assert placement.resident_weights


@pytest.mark.parametrize("name", ["gpt2", "t5", "low_rank", "partly_used", "odd_mlp"])
def test_the_norm_is_that_of_whole_gradients(name: str, tmp_path: Path) -> None:
    model = BY_NAME[name]
    found = harness.train(model, "fp32", _batches(model), VARIANTS[1], steps=3, disk=tmp_path)
    assert found.norms == _reference(name, "fp32").norms


@pytest.mark.parametrize("model", [model for model in MODELS if model.refused], ids=lambda model: model.name)
def test_gradients_that_a_trace_would_lose_are_refused_with_file_and_line(model: SmallModel) -> None:
    with pytest.raises(TraceError, match=r"models_for_tests\.py:\d+"):
        harness.traced(model, "fp32", 2)


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_two_threads(tmp_path: Path) -> None:
    model = BY_NAME["gpt2"]
    batches = _batches(model)
    found = harness.train(model, "fp32", batches, VARIANTS[1], steps=3, disk=tmp_path)
    optimizer = reference.adamw(lr=harness.LEARNING_RATE)
    expected = reference.train(model.build, batches, optimizer=optimizer, steps=3, seed=harness.SEED)
    assert_equal(found, expected)


def test_a_batch_planned_at_size_one(tmp_path: Path) -> None:
    model = BY_NAME["gpt2"]
    batches = model.batches(2, rows=1)
    found = harness.train(model, "fp32", batches, RESIDENT, steps=2, disk=tmp_path)
    expected = reference.train(
        model.build, batches, optimizer=reference.adamw(lr=harness.LEARNING_RATE), steps=2, seed=harness.SEED
    )
    assert_equal(found, expected)


def test_nothing_is_left_on_disk(tmp_path: Path) -> None:
    model = BY_NAME["mlp"]
    harness.train(model, "fp32", _batches(model), VARIANTS[1], steps=1, disk=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
