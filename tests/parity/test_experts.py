"""Mixtures of experts train with exactly the numbers of the plain loop, idle experts included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.artifacts.errors import TraceError
from stages.trace.stage import trace_module
from tests import reference
from tests.models_for_tests import VOCABULARY, WIDTH, Block, SmallModel, TokenModel, tokens
from tests.parity import harness
from tests.parity.harness import ADVERSARIAL, LEARNING_RATE, LEAST, SEED, Variant

EXPERTS = 16
STEPS = 4

_SIZES = {
    "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY,
}  # fmt: skip


class DenseMask(nn.Module):
    """Every expert sees every token; a mask says which of them counts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        mask = functional.one_hot(chosen.squeeze(-1), EXPERTS)
        y = sum(mask[..., index, None] * expert(x) for index, expert in enumerate(self.experts))
        return x + weight * y


class ByLoop(nn.Module):
    """Only the experts that are hit run, each on its own tokens: sizes follow from data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows = torch.where(chosen == index)[0]
            y = y.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
        return x + y.view_as(x)


class Dense(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(), DenseMask()) for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Looped(TokenModel):
    def __init__(self) -> None:
        super().__init__()
        self.block = ByLoop()

    def body(self, x: Tensor) -> Tensor:
        return self.block(x)


MIXTRAL = SmallModel(
    "mixtral", "transformers.MixtralForCausalLM", "transformers.MixtralConfig",
    {**_SIZES, "num_local_experts": 4, "output_router_logits": True},
)  # fmt: skip
QWEN2 = SmallModel(
    "qwen2_moe", "transformers.Qwen2MoeForCausalLM", "transformers.Qwen2MoeConfig",
    {
        **_SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "num_experts": EXPERTS, "num_experts_per_tok": 1,
    },
)  # fmt: skip
GPT_OSS = SmallModel(
    "gpt_oss", "transformers.GptOssForCausalLM", "transformers.GptOssConfig",
    {
        **_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)  # fmt: skip
DENSE = SmallModel("dense_mask", f"{__name__}.Dense")


def few_tokens(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    """Batches of a few different tokens, so that most experts are idle."""
    return {name: tensor % 3 for name, tensor in tokens(generator, rows).items()}


@pytest.mark.parametrize(
    ("model", "precision", "variant"),
    [
        (MIXTRAL, "fp32", LEAST),
        (QWEN2, "fp32", ADVERSARIAL),
        (QWEN2, "bf16", LEAST),
        (GPT_OSS, "fp32", LEAST),
        (DENSE, "fp32", ADVERSARIAL),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_experts_train_as_in_the_plain_loop(
    model: SmallModel, precision: str, variant: Variant, tmp_path: Path
) -> None:
    batches = [few_tokens(torch.Generator().manual_seed(seed), 2) for seed in (7, 8)]
    expected = reference.train(
        model.build,
        batches,
        precision=precision,
        optimizer=reference.adamw(lr=LEARNING_RATE),
        steps=STEPS,
        seed=SEED,
    )
    found = harness.train(model, precision, batches, variant, steps=STEPS, disk=tmp_path)
    assert found.losses == expected.losses
    for name, tensor in expected.final.items():
        assert torch.equal(found.final[name], tensor), name


def test_experts_are_idle_in_these_batches() -> None:
    """What the tests above rely on: some expert's gradient is zero throughout."""
    model = harness._seeded(QWEN2)
    batch = few_tokens(torch.Generator().manual_seed(7), 2)
    reference.loss_of(reference.call(model, batch)).backward()
    stacked = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"].grad
    assert stacked is not None
    assert not stacked.flatten(1).any(1).all()


def test_a_loop_over_the_experts_that_are_hit_is_refused_at_its_line() -> None:
    with pytest.raises(TraceError, match=r"test_experts\.py:\d+: module 'block'.*depends? on"):
        trace_module(Looped(), (), tokens(torch.Generator().manual_seed(7), 2))
