"""Memory without running is memory as measured, and operations are what formulas say."""

from __future__ import annotations

import pytest

from stages.artifacts import graph as g
from stages.region import memory
from stages.trace.profile.peak import PeakGauge
from stages.trace.profile.regions import measure_region
from stages.trace.profile.roofline.attention import OPERATOR, gpu_attention
from stages.trace.profile.roofline.regions import Work, work_of
from stages.trace.profile.stand_ins import representative_cases
from tests.trace.profile.hand_graph import SIDE, TENSOR_BYTES, mlp_graph
from tests.trace.tracing import traced

QUERIES = 512
HEADS, HEAD = 4, 64


@pytest.fixture(autouse=True)
def _exact_allocator() -> None:
    memory.give_back_large_blocks(1 << 16)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gpt2", "fp32"), ("llama", "fp32"), ("bert", "fp32"), ("t5", "fp32"), ("llama", "bf16")],
)
def test_saved_storages_are_those_that_were_measured(name: str, precision: str) -> None:
    graph = traced(name, precision)
    for case in representative_cases(graph).values():
        measured = measure_region(graph, case, PeakGauge())
        assert work_of(graph, case, {}).saved == measured.saved_storages, case.region.name


@pytest.mark.parametrize("rows", [64, SIDE])
def test_operations_of_matrix_products(rows: int) -> None:
    graph = mlp_graph(rows)
    work = work_of(graph, representative_cases(graph)[0], {})
    product = 2 * rows * SIDE * SIDE
    assert sum(kernel.flops for kernel in work.forward) == 2 * product
    # of each product the gradients of both factors
    assert sum(kernel.flops for kernel in work.backward) == 4 * product


def test_peaks_of_a_region_are_what_its_operators_hold() -> None:
    graph = mlp_graph()
    work = work_of(graph, representative_cases(graph)[0], {})
    assert work.saved == [TENSOR_BYTES, TENSOR_BYTES]  # h and gelu(h)
    assert work.forward_peak_bytes == 3 * TENSOR_BYTES
    assert work.dropped_peak_bytes == 2 * TENSOR_BYTES
    # gradients of w1, gelu(h), h, w0 come while what was saved goes
    assert 2 * TENSOR_BYTES <= work.backward_peak_bytes <= 3 * TENSOR_BYTES


def test_bytes_of_kernels_are_arguments_and_results_once_each() -> None:
    graph = mlp_graph()
    work = work_of(graph, representative_cases(graph)[0], {})
    assert [kernel.moved_bytes for kernel in work.forward] == [
        3 * TENSOR_BYTES,  # linear
        2 * TENSOR_BYTES,  # gelu
        3 * TENSOR_BYTES,  # linear
    ]


def attention_graph(dtype: str, *, keys: int = HEADS, masked: bool = False) -> g.RegionGraph:
    def spec(heads: int, rows: int, width: int) -> g.TensorSpec:
        return g.TensorSpec([1, heads, rows, width], [heads * rows * width, rows * width, width, 1], dtype)

    names = {"q": spec(HEADS, QUERIES, HEAD), "k": spec(keys, QUERIES, HEAD), "v": spec(keys, QUERIES, HEAD)}
    if masked:
        names["m"] = spec(1, QUERIES, QUERIES)
    args: list[g.Arg] = [g.Ref("q"), g.Ref("k"), g.Ref("v"), g.Ref("m") if masked else None, 0.0, not masked]
    out = g.Node("out", OPERATOR, args, {"enable_gqa": keys != HEADS})
    return g.RegionGraph(
        model="attention", mode="train", precision="fp32", symbols={}, inputs=[], outputs=[], loss="",
        nodes=[out, g.Node("next", "aten.sum.default", [g.Ref("out")])],
        regions=[
            g.Region("attention", 0, 0, 1, list(names), ["out"], []),
            g.Region("next", 1, 1, 2, ["out"], [], []),
        ],
        values=[
            *(g.Value(name, shape, -1, [0], requires_grad=name != "m") for name, shape in names.items()),
            g.Value("out", spec(HEADS, QUERIES, HEAD), 0, [1], requires_grad=True),
        ],
        parameters=[], initial=g.Initial("live"),
    )  # fmt: skip


def attention_work(graph: g.RegionGraph, *, flash: bool = True) -> Work:
    return work_of(graph, representative_cases(graph)[0], {OPERATOR: gpu_attention(flash=flash)})


@pytest.mark.parametrize(
    ("graph", "flash"),
    [
        (attention_graph("bfloat16"), True),
        (attention_graph("bfloat16", keys=2), True),
        (attention_graph("float16"), False),
        (attention_graph("float32"), True),
        (attention_graph("float32", masked=True), True),
    ],
    ids=["flash", "flash with shared keys", "no flash kernel", "fp32", "masked"],
)
def test_attention_on_a_gpu_keeps_no_matrix_of_queries_by_keys(graph: g.RegionGraph, flash: bool) -> None:
    work = attention_work(graph, flash=flash)
    matrix_bytes = HEADS * QUERIES * QUERIES * (4 if graph.values[0].spec.dtype == "float32" else 2)
    output_bytes = matrix_bytes * HEAD // QUERIES
    # the output, and a logarithm of a sum per query
    assert sum(work.saved) <= output_bytes + HEADS * QUERIES * 4 + 64
    assert work.backward_peak_bytes < matrix_bytes


def test_shared_keys_in_fp32_have_no_such_kernel() -> None:
    work = attention_work(attention_graph("float32", keys=2))
    assert sum(work.saved) >= HEADS * QUERIES * QUERIES * 4


def test_a_causal_kernel_does_half_of_the_products() -> None:
    causal, masked = (
        attention_work(attention_graph("float32")),
        attention_work(attention_graph("float32", masked=True)),
    )
    whole = 4 * HEADS * QUERIES * QUERIES * HEAD
    assert sum(kernel.flops for kernel in masked.forward) == whole
    assert sum(kernel.flops for kernel in causal.forward) == whole // 2
