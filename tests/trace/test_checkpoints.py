"""The user's activation-checkpoint blocks survive as marks and as regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stages.artifacts.errors import TraceError
from stages.trace.stage import trace_module
from tests import reference
from tests.models_for_tests import BY_NAME, Block
from tests.trace.tracing import built, run_regions, weights_of


class Checkpointed(nn.Module):
    """Three blocks; the second is checkpointed, and inside it the third when `nested`."""

    def __init__(self, run: Callable[..., Tensor], nested: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self._run = run
        self._nested = nested

    def outer(self, x: Tensor) -> Tensor:
        x = self.blocks[1](x)
        return self._run(self.blocks[2], x) * 2 if self._nested else x

    def forward(self, x: Tensor) -> Tensor:
        return (self._run(self.outer, self.blocks[0](x)) + 1).sum()


def reentrant(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def without_reentry(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


@pytest.mark.parametrize("run", [reentrant, without_reentry])
def test_nodes_and_regions_carry_their_block(run: Callable[..., Tensor]) -> None:
    graph = trace_module(Checkpointed(run, nested=False), (torch.randn(3, 8),))
    marked = {node.module.split(".")[1] for node in graph.nodes if node.checkpoint}
    assert marked == {"1"}
    blocks = [region for region in graph.regions if region.checkpoint >= 0]
    assert len(blocks) == 1
    inside = graph.nodes[blocks[0].start : blocks[0].end]
    assert all(node.checkpoint == [blocks[0].checkpoint] for node in inside)
    assert sum(bool(node.checkpoint) for node in graph.nodes) == len(inside)


def test_nested_blocks_are_cut_on_both_borders() -> None:
    graph = trace_module(Checkpointed(without_reentry, nested=True), (torch.randn(3, 8),))
    depths = [len(graph.nodes[region.start].checkpoint) for region in graph.regions]
    assert depths == [0, 1, 2, 1, 0]
    outer, inner, rest = graph.regions[1:4]
    assert outer.checkpoint == rest.checkpoint != inner.checkpoint
    assert graph.nodes[inner.start].checkpoint == [outer.checkpoint, inner.checkpoint]


def test_a_marked_graph_is_still_the_model() -> None:
    module = Checkpointed(without_reentry, nested=True)
    x = torch.randn(3, 8)
    graph = trace_module(module, (x,))
    torch.manual_seed(3)
    expected = module(x)
    torch.manual_seed(3)
    assert run_regions(graph, weights_of(graph, module), (x,), {}).item() == expected.item()


def test_checkpointing_that_transformers_switches_on_marks_every_layer() -> None:
    small = BY_NAME["gpt2"]
    module: Any = built(small)
    module.activation_checkpointing_enable()
    graph = trace_module(module, (), small.batches(1)[0])
    blocks = [region for region in graph.regions if region.checkpoint >= 0]
    assert [region.name for region in blocks] == ["transformer.h.0", "transformer.h.1"]
    assert blocks[0].kind == blocks[1].kind
    batch = small.batches(1)[0]
    plain = built(small)
    torch.manual_seed(3)
    expected = reference.loss_of(reference.call(plain, batch))
    torch.manual_seed(3)
    assert run_regions(graph, weights_of(graph, module), (), batch).item() == expected.item()


def redrawing(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)


def redrawing_with_reentry(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True, preserve_rng_state=False)


@pytest.mark.parametrize("run", [redrawing, redrawing_with_reentry])
def test_dropout_that_recompute_would_draw_anew_is_refused(run: Callable[..., Tensor]) -> None:
    module = Checkpointed(run, nested=True)
    with pytest.raises(TraceError, match=r"'blocks\.\d\.dropout' draws.*preserve_rng_state=False"):
        trace_module(module, (torch.randn(3, 8),))
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert any(node.checkpoint for node in trace_module(module, (torch.randn(3, 8),)).nodes)


def test_reentrant_blocks_whose_inputs_need_no_gradient_get_none_as_in_eager() -> None:
    class Scaled(Checkpointed):
        def __init__(self) -> None:
            super().__init__(reentrant, nested=False)
            self.scale = nn.Parameter(torch.ones(()))
            self.blocks[0].requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    module = Scaled()
    with pytest.warns(UserWarning, match="None of the inputs"):
        graph = trace_module(module, (torch.randn(3, 8),))
    with pytest.warns(UserWarning, match="None of the inputs"):
        module(torch.randn(3, 8)).backward()
    received = {name for region in graph.regions for name in region.gradients}
    assert received == {name for name, p in module.named_parameters() if p.grad is not None} == {"scale"}
