"""Adapters beside frozen layers: what they compute, and that training them is the plain loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from stages.artifacts.errors import ConfigError, TraceError
from stages.config import DataConfig, LoraConfig, ModelConfig, RunConfig
from stages.models import lora
from stages.region.initial import iterate_initial
from stages.runtime.stage import open_engine
from stages.trace import stage as trace
from tests import reference
from tests.models_for_tests import GPT2, LENGTH, VOCABULARY, WIDTH
from tests.parity import harness

LABELS = 3
ADAPTERS = LoraConfig(rank=4, alpha=8.0, dropout=0.1, targets=["query", "value"], train=["classifier"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT without a head, as save_pretrained leaves it."""
    folder = tmp_path_factory.mktemp("bert")
    settings = transformers.BertConfig(
        hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
    )  # fmt: skip
    torch.manual_seed(11)
    transformers.BertModel(settings).save_pretrained(folder)
    return folder


def model_config(saved: Path, **changes: Any) -> ModelConfig:
    return ModelConfig(
        "hf", "directory", "transformers.AutoModelForSequenceClassification",
        arguments={"num_labels": LABELS, **changes}, path=str(saved),
        inputs=["input_ids", "attention_mask", "labels"],
    )  # fmt: skip


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(2):
        ids = torch.randint(1, VOCABULARY, (2, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, LENGTH // 2 :] = 0
        labels = torch.randint(0, LABELS, (2,), generator=generator)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def built(saved: Path, adapters: LoraConfig) -> nn.Module:
    """The model as a person would build it; called after the seed is set."""
    settings = transformers.AutoConfig.from_pretrained(saved)
    settings.num_labels = LABELS
    model = transformers.BertForSequenceClassification(settings)
    if adapters.rank:
        lora.adapt(
            model, rank=adapters.rank, alpha=adapters.alpha, targets=adapters.targets,
            dropout=adapters.dropout, train=adapters.train,
        )  # fmt: skip
    tensors = load_file(saved / "model.safetensors")
    missing, unexpected = model.load_state_dict({f"bert.{k}": v for k, v in tensors.items()}, strict=False)
    assert not unexpected
    assert all(name.startswith("classifier") or ".lora_" in name for name in missing)
    return model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapters", [LoraConfig(), ADAPTERS], ids=["all", "adapters"])
def test_a_saved_model_with_a_new_head_trains_as_in_the_plain_loop(
    saved: Path, adapters: LoraConfig, precision: str, tmp_path: Path
) -> None:
    config = harness.config_of(GPT2, precision, rows=2, solver="greedy_async", disk=tmp_path, budget=1)
    config.model, config.lora = model_config(saved), adapters
    config.data = DataConfig("labelled", batch_size=2, seq_len=LENGTH)
    graph = trace.run(config)
    plan = harness.plan_of(config, graph, harness.costs_of(graph, config), harness.LEAST)
    fed = batches()
    expected = reference.train(
        lambda: built(saved, adapters),
        fed,
        precision=precision,
        optimizer=reference.adamw(lr=harness.LEARNING_RATE),
        steps=4,
        seed=harness.SEED,
    )
    with open_engine(config, graph, plan) as engine:
        engine.load(iterate_initial(graph, harness.SEED))
        torch.manual_seed(harness.SEED)
        losses = [
            engine.step(harness.inputs_of(graph, fed[step % 2]), harness.LEARNING_RATE).loss
            for step in range(4)
        ]
        final = {parameter.name: tensor.clone() for parameter, tensor in engine.weights()}
    assert losses == expected.losses
    for name, tensor in expected.final.items():
        assert torch.equal(final[name], tensor), name
    state = {buffer.owner for buffer in plan.buffers if buffer.role == "state"}
    if adapters.rank:
        assert all(".lora_" in name or name.startswith("classifier") for name in state)


def test_an_adapter_adds_its_scaled_product_and_begins_with_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(5, 3)
            self.second = transformers.pytorch_utils.Conv1D(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    model, x = Two(), torch.randn(2, 5)
    before, weight = model(x), model.first.weight
    lora.adapt(model, rank=2, alpha=6.0, targets=["first", "second"])
    assert torch.equal(model(x), before)
    assert model.first.weight is weight
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{layer}{end}" for layer in ("first", "second") for end in lora.WEIGHTS}
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.lora_B.weight.normal_()
    first = x @ (weight + 3.0 * model.first.lora_B.weight @ model.first.lora_A.weight).T + model.first.bias
    change = 3.0 * (model.second.lora_B.weight @ model.second.lora_A.weight).T
    expected = first @ (model.second.weight + change) + model.second.bias
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ["qurey"]}, r"lora\.targets=qurey names nothing.*query"),
        ({"targets": ["attention"]}, "expected linear layers"),
        ({"train": ["head"]}, r"lora\.train=head names nothing.*classifier"),
    ],
)
def test_patterns_that_fit_nothing_are_refused_by_name(
    saved: Path, changes: dict[str, Any], message: str
) -> None:
    settings = {"rank": 2, "targets": ["query"], **changes}
    config = RunConfig(model=model_config(saved), lora=LoraConfig(**settings), data=DataConfig("labelled"))
    with pytest.raises(ConfigError, match=message):
        trace.run(config)


def test_adapters_without_layers_and_layers_without_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        LoraConfig(rank=2)
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        LoraConfig(targets=["query"])


def test_an_argument_that_the_saved_configuration_lacks_is_refused(saved: Path) -> None:
    config = RunConfig(model=model_config(saved, num_lables=3), data=DataConfig("labelled"))
    with pytest.raises(TraceError, match="did you mean num_labels"):
        trace.run(config)
