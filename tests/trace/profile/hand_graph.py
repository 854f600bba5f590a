"""A graph written by hand, whose costs can be told by counting."""

from __future__ import annotations

from stages.artifacts import graph as g

SIDE = 1024
TENSOR_BYTES = SIDE * SIDE * 4
#: pages that the interpreter itself takes or leaves while a region runs
NOISE_BYTES = 1 << 20


def spec(*shape: g.Size, dtype: str = "float32") -> g.TensorSpec:
    stride: list[g.Size] = []
    step: g.Size = 1
    for size in reversed(shape):
        stride.insert(0, step)
        step = step * size if isinstance(step, int) and isinstance(size, int) else g.Expr("mul", step, size)
    return g.TensorSpec(list(shape), stride, dtype)


def weight(name: str) -> g.Parameter:
    return g.Parameter(name, [name], spec(SIDE, SIDE), "parameter", requires_grad=True)


def value(name: str, producer: int, consumers: list[int]) -> g.Value:
    return g.Value(name, spec("rows", SIDE), producer, consumers, requires_grad=True)


def mlp_graph(rows: int = SIDE) -> g.RegionGraph:
    """Two equal regions, gelu between two products each; the second one's weights are its own, but
    both read `x`."""
    nodes: list[g.Node] = []
    for index, (source, first, second) in enumerate([("x", "w0", "w1"), ("y0", "w2", "w3")]):
        nodes += [
            g.Node(f"h{index}", "aten.linear.default", [g.Ref(source), g.Ref(first)]),
            g.Node(f"a{index}", "aten.gelu.default", [g.Ref(f"h{index}")]),
            g.Node(f"y{index}", "aten.linear.default", [g.Ref(f"a{index}"), g.Ref(second)]),
        ]
    nodes.append(g.Node("loss", "aten.sum.default", [g.Ref("y1")]))
    return g.RegionGraph(
        model="hand",
        mode="train",
        precision="fp32",
        symbols={"rows": g.Symbol(1, 1 << 20, rows)},
        inputs=[],
        outputs=[g.OutputSpec("loss", [])],
        loss="loss",
        nodes=nodes,
        regions=[
            g.Region("first", 0, 0, 3, ["x"], ["y0"], ["w0", "w1"], ["w0", "w1"]),
            g.Region("second", 0, 3, 6, ["y0"], ["y1"], ["w2", "w3"], ["w2", "w3"]),
            g.Region("loss", 1, 6, 7, ["y1"], ["loss"], []),
        ],
        values=[
            value("x", -1, [0]),
            value("y0", 0, [1]),
            value("y1", 1, [2]),
            g.Value("loss", spec(), 2, [], requires_grad=True),
        ],
        parameters=[weight(f"w{index}") for index in range(4)],
        initial=g.Initial("live"),
    )
