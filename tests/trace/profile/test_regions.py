"""Measured memory of a region is what its operators must hold, and time grows with work."""

from __future__ import annotations

import msgspec
import pytest
import torch

from stages.artifacts import graph as g
from stages.region import memory
from stages.trace.profile import regions
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.stand_ins import Case, least_bytes, representative_cases, stand_in
from tests.trace.profile.hand_graph import NOISE_BYTES, TENSOR_BYTES, mlp_graph, spec, value


@pytest.fixture(autouse=True)
def _exact_allocator() -> None:
    memory.give_back_large_blocks(1 << 16)


def test_memory_of_a_region_is_the_bytes_that_its_operators_hold() -> None:
    graph = mlp_graph()
    cost = regions.measure_region(graph, representative_cases(graph)[0], PeakGauge())
    assert cost.saved_storages == [TENSOR_BYTES, TENSOR_BYTES]  # h and gelu(h)
    assert cost.saved_bytes == 2 * TENSOR_BYTES
    # h, gelu(h), y; when dropped, h has gone when y comes
    assert cost.forward_peak_bytes == pytest.approx(3 * TENSOR_BYTES, abs=NOISE_BYTES)
    assert cost.dropped_forward_peak_bytes == pytest.approx(2 * TENSOR_BYTES, abs=NOISE_BYTES)
    # two gradients at once in each product; what was saved may go step by step or all at the end
    assert cost.backward_peak_bytes > 2 * TENSOR_BYTES - NOISE_BYTES
    assert cost.backward_peak_bytes < 4 * TENSOR_BYTES + NOISE_BYTES


def test_time_grows_with_the_rows() -> None:
    few, many = mlp_graph(rows=32), mlp_graph(rows=2048)
    small = regions.measure_region(few, representative_cases(few)[0], PeakGauge())
    large = regions.measure_region(many, representative_cases(many)[0], PeakGauge())
    assert large.forward_ns > small.forward_ns
    assert large.backward_ns > small.backward_ns


def test_one_cost_per_kind_and_the_generator_is_left_alone() -> None:
    graph = mlp_graph(rows=8)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    cases = representative_cases(graph)
    assert sorted(cases) == [0, 1]
    for kind, case in cases.items():
        assert regions.measure_region(graph, case, PeakGauge()).kind == kind
    assert torch.equal(torch.get_rng_state(), before)


def test_a_first_use_stands_for_its_kind_with_the_sums_that_meet_there() -> None:
    # x feeds both regions, and each uses its weight twice: the first one's backward adds to two sums
    nodes = [
        g.Node("y0", "aten.linear.default", [g.Ref("x"), g.Ref("w0")]),
        g.Node("z0", "aten.linear.default", [g.Ref("y0"), g.Ref("w0")]),
        g.Node("y1", "aten.linear.default", [g.Ref("x"), g.Ref("w0")]),
        g.Node("z1", "aten.linear.default", [g.Ref("y1"), g.Ref("w0")]),
        g.Node("loss", "aten.dot.default", [g.Ref("z0"), g.Ref("z1")]),
    ]
    regions_ = [
        g.Region("first", 0, 0, 2, ["x"], ["z0"], ["w0"], ["w0"]),
        g.Region("second", 0, 2, 4, ["x"], ["z1"], ["w0"], ["w0"]),
        g.Region("loss", 1, 4, 5, ["z0", "z1"], ["loss"], []),
    ]
    values = [
        value("x", -1, [0, 1]),
        value("z0", 0, [2]),
        value("z1", 1, [2]),
        g.Value("loss", spec(), 2, [], requires_grad=True),
    ]
    graph = msgspec.structs.replace(mlp_graph(), nodes=nodes, regions=regions_, values=values)
    case = representative_cases(graph)[0]
    assert case.region.name == "first"
    assert case.sums == {"x", "w0"}
    cost = regions.measure_region(graph, case, PeakGauge())
    # the new sums of x and w0 are made beside the old ones, which are counted elsewhere
    assert cost.backward_peak_bytes > 2 * TENSOR_BYTES - NOISE_BYTES


def test_stand_ins_have_layout_and_contents_that_any_operator_takes() -> None:
    expanded = stand_in(g.TensorSpec(["b", 4], [0, 1], "float32"), {"b": 3})
    assert expanded.shape == (3, 4)
    assert expanded.stride() == (0, 1)
    assert bool((stand_in(spec(5, dtype="int64"), {}) == 0).all())
    assert bool(stand_in(spec(5, dtype="bool"), {}).all())
    assert 0 < float(stand_in(spec(100), {}).abs().max()) < 1


def test_shapes_alone_bound_the_need_of_a_region() -> None:
    graph = mlp_graph()
    case = representative_cases(graph)[0]
    # x, its gradient, the gradient of y0, two weights and their gradients
    assert least_bytes(graph, case) == 7 * TENSOR_BYTES
    assert isinstance(case, Case)
