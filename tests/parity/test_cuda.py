"""On a CUDA device: bitwise the plain loop's numbers there, for plans that move everything.

pytest -m gpu tests/parity/test_cuda.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from stages.runtime.stage import open_engine
from tests.models_for_tests import BY_NAME, SmallModel
from tests.parity import harness
from tests.parity.harness import LINKS_BESIDE_HOST, Variant

pytestmark = pytest.mark.gpu

VARIANTS = [
    Variant("resident", "resident", least=False, device="cuda"),
    Variant("least", "greedy_async", least=True, layout="tight", device="cuda"),
    Variant("recomputed", "layerwise", least=True, layout="tight", device="cuda"),
    Variant("adversarial", "greedy_async", least=True, layout="tight", lane="adversarial", device="cuda"),
]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Some kernels add up in an order that changes from run to run unless told otherwise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _plain_loop(
    model: SmallModel, precision: str, initial: Mapping[str, Tensor], batches: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final weights of an eager loop on the device, with fused AdamW on fp32 masters."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    module = model.build().cuda()
    weights = dict(module.named_parameters())
    masters = {name: nn.Parameter(initial[name].cuda().float()) for name in weights}
    for name, weight in weights.items():
        weight.data = masters[name].detach().to(dtype, copy=True)
    for name, held in module.named_buffers():
        held.copy_(initial[name].cuda())
    optimizer = torch.optim.AdamW(masters.values(), lr=harness.LEARNING_RATE, fused=True)
    torch.manual_seed(harness.SEED)
    losses = []
    for batch in batches:
        loss = module(**{name: tensor.cuda() for name, tensor in batch.items()}).loss
        losses.append(float(loss.detach()))
        module.zero_grad(set_to_none=True)
        loss.float().backward()
        for name, weight in weights.items():
            masters[name].grad = None if weight.grad is None else weight.grad.float()
        optimizer.step()
        for name, weight in weights.items():
            weight.data.copy_(masters[name].detach())
    return losses, {name: weight.detach().cpu() for name, weight in weights.items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_bitwise_equal_to_the_plain_loop_on_the_device(
    variant: Variant, precision: str, tmp_path: Path
) -> None:
    """GPT-2 with dropout and a tied head."""
    model = BY_NAME["gpt2"]
    batches = [model.batches(1, rows=2, seed=seed)[0] for seed in range(3)]
    graph, costs = harness.traced(model, precision, 2)
    costs = msgspec.structs.replace(costs, device="cuda", links=LINKS_BESIDE_HOST, baseline_bytes=64 * 2**20)
    config = harness.config_of(
        model, precision, rows=2, solver=variant.solver, lane=variant.lane, disk=tmp_path,
        budget=1 if variant.least else harness.AMPLE_BYTES,
    )  # fmt: skip
    plan = harness.plan_of(config, graph, costs, variant)
    initial = dict(harness.initial_values(model, graph))
    losses, final = _plain_loop(model, precision, initial, batches)
    with open_engine(config, graph, plan) as engine:
        engine.load(iter(initial.items()))
        torch.manual_seed(harness.SEED)
        found = [engine.step(harness.inputs_of(graph, batch)).loss for batch in batches]
        assert found == losses
        for parameter, tensor in engine.weights():
            for name in parameter.names:
                if name in final:
                    assert torch.equal(tensor.cpu(), final[name]), name


def test_pinned_memory_is_not_rounded_up() -> None:
    from stages.runtime.tiers.host import HostPool

    pool = HostPool(9 * 2**20, pin=True)
    assert pool.pinned
    assert pool.bytes.is_pinned()
    pool.close()
