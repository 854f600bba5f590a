"""Random models for the planner: skips, shared weights, several readers, frozen and unused weights."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.solve.synthetic import Block, Sketch

WIDTHS = (250, 5_000, 60_000, 250_000)
WEIGHTS = (7, 1_000, 40_000, 300_000, 1_000_003)


@st.composite
def sketches(draw: st.DrawFn, precision: str | None = None) -> Sketch:
    """A model of one to seven regions that trains something."""
    count = draw(st.integers(1, 7))
    precision = precision or draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    values = {"x": draw(st.sampled_from(WIDTHS)), "mask": 250}
    weights: dict[str, int] = {}
    buffers = {"running": 64} if draw(st.booleans()) else {}
    blocks: list[Block] = []
    for index in range(count):
        known = [name for name in values if name != "loss"]
        first = "x" if index == 0 else f"v{index - 1}"
        others = draw(st.lists(st.sampled_from(known), max_size=2))
        outputs = ["loss"] if index == count - 1 else [f"v{index}"]
        if index < count - 1 and draw(st.booleans()):
            outputs.append(f"extra{index}")
        names = _weights(draw, index, weights)
        blocks.append(
            Block(
                inputs=list(dict.fromkeys([first, *others])),
                outputs=outputs,
                weights=[*names, *buffers],
                gradients=None,
                checkpoint=draw(st.sampled_from([-1, -1, -1, 0])),
                mutates=list(buffers) if draw(st.booleans()) else [],
                saved_bytes=draw(st.sampled_from([0, 1_000, 400_000, 4_000_000])),
                forward_ns=draw(st.sampled_from([1_000, 1_000_000, 20_000_000])),
            )
        )
        values.update({name: draw(st.sampled_from(WIDTHS)) for name in outputs})
    values["loss"] = 1
    weights.update({"unused": 9_000} if draw(st.booleans()) else {})
    chosen = sorted(draw(st.sets(st.sampled_from(sorted(weights)))))
    extras = [name for name in values if name.startswith("extra")]
    plain = draw(st.sets(st.sampled_from(extras))) if extras else set()
    return Sketch(
        blocks,
        values,
        weights,
        frozen=frozenset(name for name in chosen if name != "w0"),
        plain_values=frozenset(plain),
        buffers=buffers,
        precision=precision,
        chunkable=draw(st.booleans()),
        workspace_per_element=draw(st.sampled_from([0, 4])),
    )


def _weights(draw: st.DrawFn, index: int, weights: dict[str, int]) -> list[str]:
    """Weights of a region: some of its own, some of regions before."""
    names = []
    for number in range(draw(st.integers(1 if index == 0 else 0, 2))):
        name = f"w{index}" if number == 0 else f"b{index}"
        weights[name] = draw(st.sampled_from(WEIGHTS))
        names.append(name)
    if weights and draw(st.integers(0, 3)) == 0:
        names.append(draw(st.sampled_from(sorted(weights))))
    return list(dict.fromkeys(names))
