"""Regions in a row give bitwise the gradients of one backward over the whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stages.artifacts import graph as g
from stages.region import autograd
from stages.region.interpreter import RegionFunction

_SPEC = g.TensorSpec([8, 16], [16, 1], "float32")
_CPU = torch.device("cpu")


def _graph(nodes: list[g.Node], regions: list[g.Region]) -> g.RegionGraph:
    initial = g.Initial("live")
    return g.RegionGraph(
        "hand", "train", "fp32", {}, [], [], "loss", nodes, regions, [], [], initial
    )  # fmt: skip


def _node(name: str, op: str, *args: g.Arg, random: bool = False) -> g.Node:
    return g.Node(name, f"aten.{op}", list(args), random=random)


def _ref(name: str) -> g.Ref:
    return g.Ref(name)


def _skip_model() -> tuple[g.RegionGraph, Callable[[dict[str, torch.Tensor]], torch.Tensor]]:
    """x feeds three later regions twice each; w is used once late and twice early."""
    nodes = [
        _node("x", "linear.default", _ref("data"), _ref("w")),
        _node("x1", "tanh.default", _ref("x")),
        _node("h1", "linear.default", _ref("x1"), _ref("w")),
        _node("d1", "dropout.default", _ref("h1"), 0.3, True, random=True),
        _node("a2", "mul.Tensor", _ref("d1"), _ref("x")),
        _node("h2", "sub.Tensor", _ref("a2"), _ref("x")),
        _node("a3", "mul.Tensor", _ref("h2"), _ref("x")),
        _node("b3", "linear.default", _ref("a3"), _ref("w")),
        _node("h3", "add.Tensor", _ref("b3"), _ref("x")),
        _node("loss", "sum.default", _ref("h3")),
    ]
    regions = [
        g.Region("first", 0, 0, 4, ["data"], ["x", "d1"], ["w"], ["w"], random=True),
        g.Region("second", 1, 4, 6, ["d1", "x"], ["h2"], []),
        g.Region("third", 2, 6, 10, ["h2", "x"], ["loss"], ["w"], ["w"]),
    ]

    def eager(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        functional, w = torch.nn.functional, tensors["w"]
        x = functional.linear(tensors["data"], w)
        d1 = functional.dropout(functional.linear(torch.tanh(x), w), 0.3, True)
        h2 = d1 * x - x
        return (functional.linear(h2 * x, w) + x).sum()

    return _graph(nodes, regions), eager


def _run(graph: g.RegionGraph, tensors: dict[str, torch.Tensor], keep: bool, poison: bool) -> torch.Tensor:
    """Forward and backward region by region; the gradient of w."""
    functions = [RegionFunction(graph, region, _CPU) for region in graph.regions]
    values = dict(tensors)
    tapes: dict[int, autograd.Tape] = {}
    states: dict[int, torch.Tensor] = {}

    def forward(index: int, keep: bool) -> None:
        region = graph.regions[index]
        outputs, tape = autograd.forward(
            functions[index],
            {name: values[name] for name in (*region.inputs, *region.parameters)},
            {},
            gradients_of=frozenset({*region.inputs, *region.gradients} - {"data"}),
            keep=keep,
            lookup=values.__getitem__,
        )
        for name, output in outputs.items():
            values.setdefault(name, output)
        tapes[index] = tape

    for index in range(len(functions)):
        states[index] = torch.get_rng_state()
        forward(index, keep)
        if poison:
            original, values["w"] = values["w"], torch.full_like(values["w"], float("nan"))
            values["w"] = original.clone()  # comes back elsewhere
            original.fill_(float("nan"))
    after = torch.get_rng_state()
    sums: dict[str, torch.Tensor] = {"loss": torch.ones(())}
    for index in reversed(range(len(functions))):
        region = graph.regions[index]
        if not keep:
            torch.set_rng_state(states[index])
            forward(index, keep=True)
        received = {name: sums[name] for name in region.outputs}
        so_far = {name: sums[name] for name in (*region.inputs, *region.gradients) if name in sums}
        for name, gradient in autograd.backward(tapes.pop(index), received, so_far).items():
            assert gradient is not None
            sums[name] = gradient
    torch.set_rng_state(after)
    return sums["w"]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("poison", [True, False])
def test_sums_over_regions_grow_in_the_engines_order(keep: bool, poison: bool) -> None:
    graph, eager = _skip_model()
    torch.manual_seed(3)
    tensors = {"data": torch.randn(8, 16), "w": torch.randn(16, 16)}
    leaf = tensors["w"].clone().requires_grad_()
    torch.manual_seed(5)
    eager({**tensors, "w": leaf}).backward()
    state = torch.get_rng_state()

    torch.manual_seed(5)
    gradient = _run(graph, {**tensors, "w": tensors["w"].clone()}, keep, poison)

    assert leaf.grad is not None
    assert torch.equal(gradient, leaf.grad)
    assert torch.equal(torch.get_rng_state(), state)


def test_saved_storages_leave_and_come_back() -> None:
    graph, _ = _skip_model()
    function = RegionFunction(graph, graph.regions[0], _CPU)
    tensors = {"data": torch.randn(8, 16), "w": torch.randn(16, 16)}

    def gradient(move: bool) -> torch.Tensor:
        torch.manual_seed(1)
        _, tape = autograd.forward(
            function, tensors, {}, gradients_of=frozenset({"w"}), keep=True, lookup=tensors.__getitem__
        )
        if move:
            copies = [storage.clone() for storage in tape.storages()]
            assert copies, "the region saves activations of its own"
            for storage in tape.storages():
                storage.fill_(0)
            tape.release_storages()
            assert tape.storages() == []
            tape.restore_storages(copies)
        ones = {"x": torch.ones(8, 16), "d1": torch.ones(8, 16)}
        result = autograd.backward(tape, ones, {})["w"]
        assert result is not None
        return result

    assert torch.equal(gradient(move=True), gradient(move=False))


def test_dropped_activations_leave_an_empty_tape() -> None:
    graph, _ = _skip_model()
    function = RegionFunction(graph, graph.regions[0], _CPU)
    tensors = {"data": torch.randn(8, 16), "w": torch.randn(16, 16)}
    outputs, tape = autograd.forward(
        function, tensors, {}, gradients_of=frozenset({"w"}), keep=False, lookup=tensors.__getitem__
    )
    assert set(outputs) == {"x", "d1"}
    assert not outputs["x"].requires_grad
    assert tape.outputs == {}
    assert tape.storages() == []


def test_lazily_conjugated_tensors_are_saved_as_such() -> None:
    nodes = [
        _node("z", "view_as_complex.default", _ref("x")),
        _node("conjugate", "conj.default", _ref("z")),
        _node("imaginary", "imag.default", _ref("conjugate")),
        _node("product", "mul.Tensor", _ref("conjugate"), _ref("w")),
        _node("real", "real.default", _ref("product")),
        _node("scaled", "mul.Tensor", _ref("real"), _ref("imaginary")),
        _node("loss", "sum.default", _ref("scaled")),
    ]
    region = g.Region("whole", 0, 0, 7, ["x"], ["loss"], ["w"], ["w"])
    tensors = {"x": torch.randn(6, 2), "w": torch.randn(6, dtype=torch.complex64)}
    _, tape = autograd.forward(
        RegionFunction(_graph(nodes, [region]), region, _CPU),
        tensors,
        {},
        gradients_of=frozenset({"x", "w"}),
        keep=True,
        lookup=tensors.__getitem__,
    )
    found = autograd.backward(tape, {"loss": torch.ones(())}, {})

    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    conjugate = torch.view_as_complex(leaves["x"]).conj()
    ((conjugate * leaves["w"]).real * conjugate.imag).sum().backward()
    for name, leaf in leaves.items():
        gradient = found[name]
        assert gradient is not None
        assert torch.equal(gradient, leaf.grad)  # type: ignore[arg-type]
