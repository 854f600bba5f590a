"""Plans for an accelerator, carried out on one that is emulated: bitwise the plain loop's numbers.

What leaves the device waits in host memory and, where that is full, on disk behind it; copies run as
late as an accelerator may run them, and memory that is free or not yet filled holds NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stages.artifacts.plan import Plan
from stages.runtime.tiers import links
from stages.solve import homes
from stages.solve.verifier import disk as verified_homes
from tests import reference
from tests.models_for_tests import BY_NAME
from tests.parity import harness, reading_ahead
from tests.parity.harness import Variant
from tests.parity.test_parity import STEPS, _batches, _reference, assert_equal

#: small, so that a small model's tensors take several blocks, and a host can be full
_BOUNCE_BYTES = 4 * 4096

_LATE = {"least": True, "layout": "tight", "lane": "adversarial", "device": "emulated"}
RESIDENT = Variant("resident", "resident", least=False, device="emulated")
HOST = Variant("host", "greedy_async", **_LATE)
LAYERWISE = Variant("layerwise", "layerwise", **_LATE)
PROMPT = Variant("prompt", "greedy_async", least=True, layout="tight", device="emulated")
READ_AHEAD = Variant(
    "read_ahead", "milp", least=False, layout="tight", lane="adversarial", solve=reading_ahead.solve,
    device="emulated",
)  # fmt: skip
VARIANTS = [RESIDENT, HOST, LAYERWISE, PROMPT]

CASES = [
    *(("gpt2", "fp32", variant) for variant in VARIANTS),
    ("gpt2", "fp16", HOST),
    *((name, "fp32", HOST) for name in ("lstm", "conv_bn", "block_twice")),
    ("three_way_tie", "bf16", HOST),
    ("odd_mlp", "bf16", READ_AHEAD),
]


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (homes, verified_homes):
        monkeypatch.setattr(module, "BOUNCE_BYTES", _BOUNCE_BYTES)
    monkeypatch.setattr(links, "BLOCK_BYTES", _BOUNCE_BYTES // 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that the harness made."""
    made: list[Plan] = []
    plan_of = harness.plan_of

    def noted(*arguments: object, **named: object) -> Plan:
        made.append(plan_of(*arguments, **named))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(harness, "plan_of", noted)
    return made


def _train(name: str, precision: str, variant: Variant, disk: Path, **more: object) -> reference.Result:
    model = BY_NAME[name]
    steps = STEPS[precision]
    return harness.train(model, precision, _batches(model), variant, steps=steps, disk=disk, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "precision", "variant"), CASES, ids=lambda part: getattr(part, "name", part)
)
def test_bitwise_equal_to_the_plain_loop(
    name: str, precision: str, variant: Variant, tmp_path: Path, plans: list[Plan]
) -> None:
    found = _train(name, precision, variant, tmp_path)
    assert_equal(found, _reference(name, precision))
    assert (plans[-1].host_pool_bytes > 0) == (variant is not RESIDENT)
    assert plans[-1].disk_bytes == 0


@pytest.mark.parametrize(("name", "precision"), [("gpt2", "fp16"), ("odd_mlp", "fp32")])
@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_what_a_full_host_does_not_hold_passes_through_to_the_disk(
    name: str, precision: str, lane: str, tmp_path: Path, plans: list[Plan]
) -> None:
    _train(name, precision, HOST, tmp_path)
    half = plans[-1].host_bytes - plans[-1].host_pool_bytes // 2
    variant = Variant("half", "greedy_async", True, "tight", lane, device="emulated", host_budget=str(half))
    found = _train(name, precision, variant, tmp_path)
    assert_equal(found, _reference(name, precision))
    assert plans[-1].host_pool_bytes > 0
    assert plans[-1].disk_bytes > _BOUNCE_BYTES
    assert plans[-1].host_bytes <= half


def test_micro_batches(tmp_path: Path, plans: list[Plan]) -> None:
    model = BY_NAME["gpt2"]
    batches = [model.batches(1, rows=4, seed=seed)[0] for seed in range(2)]
    optimizer = reference.adamw(lr=harness.LEARNING_RATE)
    expected = reference.train(
        model.build, batches, optimizer=optimizer, steps=2, seed=harness.SEED, micro_batches=2
    )
    found = harness.train(
        model, "fp32", batches, HOST, steps=2, disk=tmp_path, micro_batches=2, order="vertical"
    )
    assert_equal(found, expected)
    assert plans[-1].host_pool_bytes > 0
