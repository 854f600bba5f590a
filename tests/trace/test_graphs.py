"""Traced graphs are the model: bitwise, whole, and cut where cuts are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stages.artifacts import envelope
from stages.artifacts import graph as g
from stages.region.interpreter import node_references
from stages.trace.effects import written
from tests import reference
from tests.models_for_tests import BY_NAME, MODELS
from tests.trace.tracing import built, run_regions, traced, weights_of

TRACEABLE = [model.name for model in MODELS if not model.refused]


@pytest.mark.parametrize("name", TRACEABLE)
def test_regions_in_a_row_are_bitwise_the_model(name: str) -> None:
    graph = traced(name)
    batch = BY_NAME[name].batches(1)[0]
    model = built(BY_NAME[name])
    weights = weights_of(graph, model)
    torch.manual_seed(3)
    expected = reference.loss_of(reference.call(model, batch))
    expected.backward()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    loss = run_regions(graph, weights, (), batch)
    loss.backward()
    assert loss.item() == expected.item()
    assert torch.equal(torch.get_rng_state(), state)
    for key, parameter in model.named_parameters():
        made = weights[key].grad
        assert (made is None) == (parameter.grad is None), key
        assert made is None or torch.equal(made, parameter.grad), key
    for key, buffer in model.named_buffers():
        assert torch.equal(weights[key], buffer), key
    receiving = {key for region in graph.regions for key in region.gradients}
    assert receiving == {key for key, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_in_16_bits_and_cut_finely_they_are_still_the_model(name: str) -> None:
    graph = traced(name, "bf16", "fine")
    batch = BY_NAME[name].batches(1)[0]
    model = built(BY_NAME[name])
    weights = weights_of(graph, model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    torch.manual_seed(3)
    reference.loss_of(reference.call(model, batch)).backward()
    torch.manual_seed(3)
    run_regions(graph, weights, (), batch).backward()
    for key, parameter in model.named_parameters():
        assert weights[key].grad is not None
        assert parameter.grad is not None
        assert torch.equal(weights[key].grad, parameter.grad), key


@pytest.mark.parametrize("name", TRACEABLE)
def test_the_artifact_comes_back_equal(name: str, tmp_path: Path) -> None:
    envelope.save(tmp_path / "graph.json", traced(name))
    assert envelope.load(tmp_path / "graph.json", g.RegionGraph) == traced(name)


@pytest.mark.parametrize("name", TRACEABLE)
def test_regions_are_contiguous_and_cover_all_nodes(name: str) -> None:
    graph = traced(name)
    assert graph.regions[0].start == 0
    assert graph.regions[-1].end == len(graph.nodes)
    for before, after in zip(graph.regions, graph.regions[1:], strict=False):
        assert before.end == after.start
        assert before.start < before.end
    assert len({region.name for region in graph.regions}) == len(graph.regions)


@pytest.mark.parametrize("name", TRACEABLE)
def test_every_value_is_made_before_it_is_read_and_both_sides_agree(name: str) -> None:
    graph = traced(name)
    values = {value.name: value for value in graph.values}
    stored = {parameter.name for parameter in graph.parameters}
    assert {spec.name for spec in graph.inputs} <= set(values)
    for index, region in enumerate(graph.regions):
        made: set[str] = set()
        for node in graph.nodes[region.start : region.end]:
            for read in node_references(node):
                assert read in made or read in region.inputs or read in region.parameters
            made.add(node.name)
        assert set(region.parameters) <= stored
        assert set(region.gradients) | set(region.mutates) <= set(region.parameters)
        for read in region.inputs:
            assert values[read].producer < index
            assert index in values[read].consumers
        for output in region.outputs:
            assert values[output].producer == index
    for value in graph.values:
        assert value.consumers == sorted(value.consumers)
        returned = value.name in {output.name for output in graph.outputs} | {graph.loss}
        assert value.consumers or returned or value.producer == -1


@pytest.mark.parametrize("name", TRACEABLE)
def test_no_value_changes_after_the_region_that_made_it(name: str) -> None:
    graph = traced(name)
    values = {value.name: value for value in graph.values}
    for index, region in enumerate(graph.regions):
        for node in graph.nodes[region.start : region.end]:
            for target in written(node.op, node.args, node.kwargs)[0]:
                assert target not in values or values[target].producer == index


def test_in_place_residuals_keep_their_blocks_together() -> None:
    graph = traced("in_place_residual")
    changing = {
        index
        for index, region in enumerate(graph.regions)
        for node in graph.nodes[region.start : region.end]
        if node.op.startswith("aten.add_.")
    }
    assert len(changing) == 1


def test_views_of_one_storage_share_an_alias_set() -> None:
    graph = traced("views_across")
    sets = [value.alias_set for value in graph.values if value.alias_set >= 0]
    assert all(sets.count(number) > 1 for number in sets)


def test_equal_blocks_are_one_kind_and_different_ones_are_not() -> None:
    kinds = {region.name: region.kind for region in traced("gpt2").regions}
    assert kinds["transformer.h.0"] == kinds["transformer.h.1"]
    assert len(set(kinds.values())) == len(kinds) - 1
    t5 = {region.name: region.kind for region in traced("t5").regions}
    assert t5["decoder.block.0"] != t5["decoder.block.1"]  # the first one makes the position bias


def test_the_loss_reads_no_weight_and_the_head_makes_no_loss() -> None:
    *_, head, loss = traced("gpt2").regions
    assert loss.name == "loss"
    assert not loss.parameters
    assert head.name == "lm_head"
    assert "transformer.wte.weight" in head.gradients


def test_fine_granularity_cuts_blocks_at_attention_and_mlp() -> None:
    names = [region.name for region in traced("gpt2", "bf16", "fine").regions]
    assert names[1:5] == [
        "transformer.h.0.attn",
        "transformer.h.0.mlp",
        "transformer.h.1.attn",
        "transformer.h.1.mlp",
    ]


def test_a_block_called_twice_is_two_regions_that_both_give_gradients() -> None:
    again = [region for region in traced("block_twice").regions if region.name.startswith("again")]
    assert [region.name for region in again] == ["again", "again@1"]
    assert again[0].kind == again[1].kind
    assert again[0].gradients == again[1].gradients != []


def test_tied_weights_are_one_parameter_with_all_names() -> None:
    graph = traced("three_way_tie")
    names = {parameter.name: parameter.names for parameter in graph.parameters}
    assert names["embedding.weight"] == ["embedding.weight", "head.weight", "middle.weight"]
    assert names["left.weight"] == ["left.weight", "right.weight"]
    assert "head.weight" not in names
    assert "right.weight" not in names
    assert sum("embedding.weight" in region.gradients for region in graph.regions) >= 3


def test_unused_and_frozen_parameters_receive_nothing() -> None:
    graph = traced("partly_used")
    receiving = {key for region in graph.regions for key in region.gradients}
    reading = {key for region in graph.regions for key in region.parameters}
    assert "used.weight" in receiving
    assert "frozen.weight" in reading - receiving
    assert "unused.weight" not in reading


def test_buffers_are_mutated_where_the_model_mutates_them() -> None:
    mutated = [key for region in traced("conv_bn").regions for key in region.mutates]
    norms = [key for key in mutated if key.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert len(norms) == len(mutated) == 6


def test_values_without_gradient_say_so() -> None:
    needs = {value.name: value.requires_grad for value in traced("t5").values}
    assert not any(needs[spec.name] for spec in traced("t5").inputs)
    assert needs[traced("t5").loss]


def test_parameters_keep_registration_order_then_buffers() -> None:
    model = BY_NAME["conv_bn"].build()
    expected = [name for name, _ in model.named_parameters()] + [name for name, _ in model.named_buffers()]
    assert [parameter.name for parameter in traced("conv_bn").parameters] == expected


def test_random_nodes_are_those_that_draw() -> None:
    graph = traced("gpt2")
    assert all(node.random for node in graph.nodes if node.op == "aten.dropout.default")
    assert not any(region.random for region in graph.regions if region.name in ("loss", "lm_head"))
    assert not any(node.random for node in traced("llama").nodes)


def test_nodes_know_their_module_and_line() -> None:
    for node in traced("gpt2").nodes:
        file, _, line = node.location.rpartition(":")
        assert file.endswith(".py")
        assert line.isdigit()
    assert {"transformer.h.0.attn.c_attn", "lm_head"} <= {node.module for node in traced("gpt2").nodes}
