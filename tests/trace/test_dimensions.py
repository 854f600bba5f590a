"""Batch and sequence may vary; what the model fixes is fixed at the planned size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.trace.stage import trace_module
from tests import reference
from tests.models_for_tests import BY_NAME
from tests.trace.tracing import built, run_regions, weights_of


def compare(module: nn.Module, graph: Any, batch: dict[str, Tensor]) -> None:
    weights = weights_of(graph, module)
    torch.manual_seed(3)
    expected = reference.loss_of(reference.call(module, batch))
    torch.manual_seed(3)
    assert run_regions(graph, weights, (), batch).item() == expected.item()


@pytest.mark.parametrize("name", ["gpt2", "conv_bn", "three_way_tie"])
@pytest.mark.parametrize("planned", [1, 3])
def test_planned_batch_and_a_short_last_batch_are_the_model(name: str, planned: int) -> None:
    small = BY_NAME[name]
    module = built(small)
    graph = trace_module(module, (), small.batches(1, rows=planned)[0])
    assert graph.symbols["batch"].planned == planned
    assert graph.symbols["batch"].minimum == 1
    for rows in {1, planned}:
        compare(built(small), graph, small.batches(1, rows=rows)[0])


def test_sizes_are_expressions_over_the_symbols() -> None:
    small = BY_NAME["gpt2"]
    graph = trace_module(built(small), (), small.batches(1)[0])
    assert set(graph.symbols) == {"batch", "seq"}
    assert {value.name: value.spec.shape for value in graph.values}["input_ids"] == ["batch", "seq"]
    assert not any("sym_size" in node.op for node in graph.nodes)


def test_without_dynamic_every_size_is_fixed() -> None:
    small = BY_NAME["mlp"]
    graph = trace_module(built(small), (), small.batches(1)[0], dynamic=False)
    assert not graph.symbols
    assert all(isinstance(size, int) for value in graph.values for size in value.spec.shape)


class FixedLength(nn.Module):
    """Its weights hold one sequence length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.mix = nn.Linear(length, length)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.mix(input_ids.float()).sum()


@pytest.mark.parametrize("length", [1, 6])
def test_a_dimension_that_the_model_fixes_is_static_at_the_planned_size(length: int) -> None:
    ids = torch.ones(2, length, dtype=torch.int64)
    graph = trace_module(FixedLength(length), (), {"input_ids": ids})
    assert set(graph.symbols) == {"batch"}
    assert graph.inputs[0].spec.shape == ["batch", length]
    compare(
        FixedLength(length), trace_module(FixedLength(length), (), {"input_ids": ids}), {"input_ids": ids}
    )


class Branching(nn.Module):
    """Takes another path for short and for long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        if input_ids.shape[1] < 4:
            x = x * 2
        elif input_ids.shape[1] > 9:
            x = x * 3
        return x.sum()


@pytest.mark.parametrize(("length", "minimum", "maximum"), [(3, 2, 3), (6, 4, 9), (12, 10, 2**31 - 1)])
def test_a_branch_on_a_size_bounds_the_dimension(length: int, minimum: int, maximum: int) -> None:
    ids = torch.ones(2, length, dtype=torch.int64)
    symbol = trace_module(Branching(), (), {"input_ids": ids}).symbols["seq"]
    assert (symbol.minimum, symbol.maximum, symbol.planned) == (minimum, maximum, length)


class RootOfLength(nn.Module):
    """Divides by the root of the length, which the size grammar cannot say."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embedding(input_ids).sum() / input_ids.shape[1] ** 0.5


def test_a_size_outside_the_grammar_fixes_its_dimension() -> None:
    ids = torch.ones(2, 5, dtype=torch.int64)
    module = RootOfLength()
    graph = trace_module(module, (), {"input_ids": ids})
    assert set(graph.symbols) == {"batch"}
    compare(module, graph, {"input_ids": ids})


def test_equal_batch_and_sequence_lengths_stay_two_dimensions() -> None:
    small = BY_NAME["gpt2"]
    ids = torch.randint(0, 512, (4, 4))
    graph = trace_module(built(small), (), {"input_ids": ids, "labels": ids})
    assert graph.inputs[0].spec.shape == ["batch", "seq"]
    shorter = torch.randint(0, 512, (2, 4))
    compare(built(small), graph, {"input_ids": shorter, "labels": shorter})


class Nested(nn.Module):
    """Positional, nested and absent inputs; nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, more: dict[str, Any], scale: float = 1.0, none: None = None
    ) -> dict[str, Any]:
        y = self.linear(x) * scale + more["bias"][0]
        return {"parts": [y, (y * 2, None)], "loss": y.sum(), "count": 3}


def test_structured_inputs_and_outputs_are_found_by_path() -> None:
    module = Nested()
    args = (torch.randn(3, 4), {"bias": [torch.randn(3, 4)], "name": "x"})
    graph = trace_module(module, args, {"scale": 0.5})
    assert [spec.path for spec in graph.inputs] == [["args", 0], ["args", 1, "bias", 0]]
    assert [spec.path for spec in graph.outputs] == [["parts", 0], ["parts", 1, 0], ["loss"]]
    loss = run_regions(graph, weights_of(graph, module), args, {"scale": 0.5})
    assert loss.item() == module(*args, scale=0.5)["loss"].item()


def test_an_evaluation_graph_has_no_dropout_and_does_not_touch_the_module() -> None:
    small = BY_NAME["gpt2"]
    module = built(small)
    graph = trace_module(module, (), small.batches(1)[0], mode="eval")
    assert graph.mode == "eval"
    assert not any(region.random for region in graph.regions)
    assert module.training
    batch = small.batches(1)[0]
    assert (
        run_regions(graph, weights_of(graph, module), (), batch).item() == module.eval()(**batch).loss.item()
    )
