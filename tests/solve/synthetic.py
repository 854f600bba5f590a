"""Region graphs and costs made up for the planner: no torch, no nodes."""

from __future__ import annotations

from dataclasses import dataclass, field

from stages.artifacts.costs import Costs, LinkCost, OptimizerCost, RegionCost, StateSpec
from stages.artifacts.graph import (
    Initial,
    InputSpec,
    Parameter,
    Region,
    RegionGraph,
    Symbol,
    TensorSpec,
    Value,
)
from stages.artifacts.plan import Placement, RegionPlacement

MEGA = 10**6
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}


def tensor(elements: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec([elements], [1], dtype)


@dataclass
class Block:
    """A region to be. Names of values and weights; sizes come from the model's tables."""

    inputs: list[str]
    outputs: list[str]
    weights: list[str] = field(default_factory=list)
    gradients: list[str] | None = None  # None: of every trainable weight
    checkpoint: int = -1
    mutates: list[str] = field(default_factory=list)
    saved_bytes: int = 4 * MEGA
    forward_ns: int = 10 * MEGA
    kind: int | None = None


@dataclass
class Sketch:
    """A model to be: elements of its values, weights and buffers, and its blocks."""

    blocks: list[Block]
    values: dict[str, int]
    weights: dict[str, int]
    frozen: frozenset[str] = frozenset()
    plain_values: frozenset[str] = frozenset()  # without gradient
    buffers: dict[str, int] = field(default_factory=dict)
    precision: str = "fp32"
    chunkable: bool = True
    workspace_per_element: int = 0
    loss: str = "loss"
    baseline_bytes: int = 10 * MEGA
    stage_peak_bytes: int = 0
    alias_sets: dict[str, int] = field(default_factory=dict)

    def graph(self) -> RegionGraph:
        dtype = DTYPES[self.precision]
        producer = {name: index for index, block in enumerate(self.blocks) for name in block.outputs}
        values = [
            Value(
                name,
                tensor(elements, dtype),
                producer.get(name, -1),
                [index for index, block in enumerate(self.blocks) if name in block.inputs],
                requires_grad=name in producer and name not in self.plain_values,
                alias_set=self.alias_sets.get(name, -1),
            )
            for name, elements in self.values.items()
        ]
        weights = [
            Parameter(name, [name], tensor(elements, dtype), "parameter", name not in self.frozen)
            for name, elements in self.weights.items()
        ]
        buffers = [
            Parameter(name, [name], tensor(elements), "buffer") for name, elements in self.buffers.items()
        ]
        regions = [self._region(index, block) for index, block in enumerate(self.blocks)]
        inputs = [InputSpec(value.name, ["args", 0], value.spec) for value in values if value.producer < 0]
        return RegionGraph(
            model="sketch", mode="train", precision=self.precision, symbols={"batch": Symbol(1, 64, 64)},
            inputs=inputs, outputs=[],
            loss=self.loss, nodes=[], regions=regions, values=values, parameters=[*weights, *buffers],
            initial=Initial("live"),
        )  # fmt: skip

    def _region(self, index: int, block: Block) -> Region:
        trainable = [name for name in block.weights if name in self.weights and name not in self.frozen]
        return Region(
            name=f"r{index}",
            kind=index if block.kind is None else block.kind,
            start=index,
            end=index + 1,
            inputs=block.inputs,
            outputs=block.outputs,
            parameters=block.weights,
            gradients=trainable if block.gradients is None else block.gradients,
            mutates=block.mutates,
            checkpoint=block.checkpoint,
        )

    def costs(self, **changes: object) -> Costs:
        itemsize = ITEMSIZE[self.precision]
        regions = {}
        for index, block in enumerate(self.blocks):
            out = sum(self.values[name] for name in block.outputs) * itemsize
            sent = sum(self.values[name] for name in block.inputs) * itemsize
            sent += sum(self.weights.get(name, 0) for name in block.weights) * itemsize
            kind = index if block.kind is None else block.kind
            regions[kind] = RegionCost(
                kind=kind,
                forward_ns=block.forward_ns,
                backward_ns=2 * block.forward_ns,
                saved_bytes=block.saved_bytes,
                saved_storages=[block.saved_bytes],
                forward_peak_bytes=out + block.saved_bytes + MEGA // 4,
                dropped_forward_peak_bytes=out + MEGA // 2,
                backward_peak_bytes=sent + MEGA // 2,
            )
        states = {
            name: [StateSpec(state, elements, "float32") for state in ("exp_avg", "exp_avg_sq")]
            for name, elements in self.weights.items()
            if name not in self.frozen
        }
        optimizer = OptimizerCost(
            "fused_adamw", self.chunkable, 10**9, 1000, states, self.workspace_per_element
        )
        links = [
            LinkCost("disk_read", 100_000, 2 * 10**9, 12 * 10**8),
            LinkCost("disk_write", 100_000, 10**9, 7 * 10**8),
        ]
        record: dict[str, object] = {
            "device": "cpu", "threads": 2, "source": "measured", "baseline_bytes": self.baseline_bytes,
            "stage_peak_bytes": {"trace": self.stage_peak_bytes}, "regions": list(regions.values()),
            "links": links, "optimizer": optimizer,
        }  # fmt: skip
        return Costs(**{**record, **changes})  # type: ignore[arg-type]


def chain(
    count: int = 4,
    *,
    width: int = 250_000,
    weight: int = 2_000_000,
    precision: str = "fp32",
    tied: bool = False,
    **changes: object,
) -> Sketch:
    """`count` equal blocks in a row, the last giving the loss; `tied`: first and last share a weight."""
    values = {"x": width, **{f"v{index}": width for index in range(count - 1)}, "loss": 1}
    weights: dict[str, int] = {}
    blocks = []
    for index in range(count):
        names = [f"w{index}", f"b{index}"]
        weights.update({names[0]: weight, names[1]: 1000})
        source = "x" if index == 0 else f"v{index - 1}"
        target = "loss" if index == count - 1 else f"v{index}"
        blocks.append(Block([source], [target], names, kind=0 if 0 < index < count - 1 else index + 1))
    if tied:
        blocks[-1].weights.append("w0")
    return Sketch(blocks, values, weights, precision=precision, **changes)  # type: ignore[arg-type]


def placement(
    sketch: Sketch,
    *,
    weights: str = "resident",
    activations: str = "keep",
    state: str = "resident",
    gradients: str = "consume",
    values: str = "keep",
    chunk_elements: int = 65536,
    prefetch: int = 0,
    chunk_slots: int = 1,
    micro_batches: int = 1,
    order: str = "vertical",
) -> Placement:
    """The same choice everywhere."""
    inner = {name for block in sketch.blocks for name in block.outputs}
    return Placement(
        regions=[
            RegionPlacement(weights, "recompute" if block.checkpoint >= 0 else activations)
            for block in sketch.blocks
        ],
        state=dict.fromkeys((name for name in sketch.weights if name not in sketch.frozen), state),
        gradients=gradients,
        values={name: values for name in sketch.values if name in inner},
        chunk_elements=chunk_elements,
        prefetch=[prefetch] * len(sketch.blocks),
        chunk_slots=chunk_slots,
        micro_batches=micro_batches,
        micro_batch_order=order,
    )
