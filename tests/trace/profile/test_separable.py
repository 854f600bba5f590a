"""A batch is cut only where its loss and gradients are made up by those of slices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.config import SolverConfig, TrainConfig
from stages.trace import stage as trace
from stages.trace.profile.cuts import loss_for, numbers_of_slices
from stages.trace.profile.separable import loss_of_slices
from tests.models_for_tests import BY_NAME, WIDTH, Block, SmallModel, TokenModel, tokens
from tests.parity.harness import config_of


class Regression(nn.Module):
    """[rows, 8] to [rows, 4]; `reduction` over all elements."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.linear(x), y, reduction=self.reduction)


class Contrastive(nn.Module):
    """Each row's partner against the other rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.linear(x) @ self.linear(y).T
        return -functional.log_softmax(scores, dim=1).diagonal().mean()


class BatchNormed(nn.Module):
    """A norm over the batch that keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4, track_running_stats=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.norm(self.linear(x)), y)


class Experts(TokenModel):
    """Two experts, and a small loss that balances them over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block(dropout=0.0) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        shares = self.gate(x).softmax(-1)
        mixed = sum(shares[..., index, None] * expert(x) for index, expert in enumerate(self.experts))
        loss = functional.cross_entropy(self.head(mixed).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.01 * 2 * (shares.mean((0, 1)) ** 2).sum()}


class Centred(nn.Module):
    """The value does not see other rows, the gradient does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.linear(x)
        mean = out.mean(0)
        return functional.mse_loss(out + (mean - mean.detach()), y)


class Weighted(TokenModel):
    """Targets count by class."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embedding(input_ids)).flatten(0, 1)
        weight = torch.linspace(0.5, 2.0, logits.shape[-1])
        return functional.cross_entropy(logits, labels.flatten(), weight=weight)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.linear(x) + torch.randn_like(y), y)


def graph_of(model: nn.Module, rows: int = 4) -> g.RegionGraph:
    if isinstance(model, TokenModel):
        ids = torch.randint(0, 512, (rows, 16))
        return trace.trace_module(model, (), {"input_ids": ids, "labels": ids.clone()}, only_loss=True)
    width = model.linear.out_features
    batch = {"x": torch.randn(rows, 8), "y": torch.randn(rows, width)}
    return trace.trace_module(model, (), batch, only_loss=True)


def small_graph(model: SmallModel) -> g.RegionGraph:
    if model.make_batch is tokens:
        return trace.run(config_of(model, "fp32", rows=2))
    return trace.trace_module(model.build(), (), model.batches(1, rows=2)[0], only_loss=True)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mlp", "lstm", "block_twice"])
def test_cross_entropies_over_tokens_are_found_out(name: str) -> None:
    assert loss_of_slices(small_graph(BY_NAME[name]), "auto") == "token_mean"


@pytest.mark.parametrize(("reduction", "kind"), [("mean", "mean"), ("sum", "sum")])
def test_means_and_sums_over_rows_are_found_out(reduction: str, kind: str) -> None:
    assert loss_of_slices(graph_of(Regression(reduction)), "auto") == kind


@pytest.mark.parametrize("model", [Contrastive, BatchNormed, Experts, Centred, Weighted])
def test_what_mixes_rows_is_refused_with_its_reason(model: type[nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"cannot be cut into micro-batches.*train\.loss=mean"):
        loss_of_slices(graph_of(model()), "auto")


def test_running_statistics_are_refused_even_where_declared() -> None:
    for declared in ("auto", "mean"):
        with pytest.raises(ConfigError, match="running statistics"):
            loss_of_slices(small_graph(BY_NAME["conv_bn"]), declared)


def test_noise_that_cannot_be_turned_off_asks_for_a_declaration() -> None:
    graph = graph_of(Noisy())
    with pytest.raises(ConfigError, match=r"draws random numbers.*train\.loss=mean"):
        loss_of_slices(graph, "auto")
    assert loss_of_slices(graph, "mean") == "mean"


def test_means_over_targets_must_have_targets() -> None:
    for model in (Regression(), Weighted(), Experts()):
        with pytest.raises(ConfigError, match=r"train\.loss=token_mean does not fit"):
            loss_of_slices(graph_of(model), "token_mean")


def test_the_generator_is_left_alone() -> None:
    graph = graph_of(Regression())
    before = torch.get_rng_state()
    loss_of_slices(graph, "auto")
    assert torch.equal(torch.get_rng_state(), before)


def test_the_solver_may_choose_powers_of_two_that_divide_the_batch() -> None:
    config = config_of(BY_NAME["gpt2"], "fp32", rows=2)
    auto = dataclasses.replace(config, solver=SolverConfig("resident", micro_batches="auto"))
    assert numbers_of_slices(auto, graph_of(Regression(), rows=12), "mean") == [2, 4]
    assert numbers_of_slices(auto, graph_of(Regression(), rows=12), "") == []
    loss, why = loss_for(auto, graph_of(Contrastive()))
    assert not loss
    assert "cannot be cut" in why
    given = dataclasses.replace(
        config, train=TrainConfig(2), data=dataclasses.replace(config.data, batch_size=2)
    )
    with pytest.raises(ConfigError, match="cannot be cut"):
        loss_for(given, graph_of(Contrastive()))
