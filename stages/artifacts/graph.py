"""The traced model as data: every node, cut into regions, with what the planner must know.

No torch here. Nodes name ATen operators (`"aten.linear.default"`) or `"getitem"`; the runtime
rebuilds callables from an allow-list of names. Sizes are expressions over the batch's symbols, so
no node computes one. Arguments are plain JSON values or the tagged structs below, so that nothing
in an artifact is code.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

#: no size, offset or count of ours is larger; a crafted one would only fail later and less clearly
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
#: a number of bytes, elements or nanoseconds
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
#: of a tensor, without "torch."
DtypeName = Annotated[
    str,
    msgspec.Meta(pattern="^(b?float16|float32|float64|u?int8|int16|int32|int64|bool|complex64|complex128)$"),
]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every record in an artifact."""


class Expr(Struct, frozen=True, tag="expr", tag_field="is"):
    """Arithmetic on sizes. operator: add, sub, mul, floordiv, mod, max, min."""

    operator: str
    left: Size
    right: Size


#: A size: an integer, the name of a symbol ("s0"), or an expression over them.
Size = Integer | str | Expr


class Ref(Struct, frozen=True, tag="ref", tag_field="is"):
    """The result of an earlier node, a graph input, a parameter or a buffer, by name."""

    name: str


class SizeArg(Struct, frozen=True, tag="size", tag_field="is"):
    """A symbolic size as an argument: evaluated from the batch's shapes before the step."""

    size: Size


class Dtype(Struct, frozen=True, tag="dtype", tag_field="is"):
    name: str  # "float32", "bfloat16", "int64", "bool", ...


class Device(Struct, frozen=True, tag="device", tag_field="is"):
    """The device the plan runs on ("target") or the host ("cpu")."""

    name: str = "target"


class Layout(Struct, frozen=True, tag="layout", tag_field="is"):
    name: str  # "strided"


class MemoryFormat(Struct, frozen=True, tag="memory_format", tag_field="is"):
    name: str  # "contiguous_format", "preserve_format", "channels_last"


class Special(Struct, frozen=True, tag="float", tag_field="is"):
    """A float that JSON cannot hold: "inf", "-inf", "nan"."""

    name: str


Scalar = (
    None | bool | Integer | float | str | Ref | SizeArg | Dtype | Device | Layout | MemoryFormat | Special
)

#: An argument of an operator: a scalar, or lists of them to depth two (msgspec wants it spelt out).
Arg = Scalar | list[Scalar | list[Scalar]]


class Autocast(Struct, frozen=True):
    """The autocast state in which a node was traced, where it differs from off."""

    enabled: bool
    dtype: str


class TensorSpec(Struct, frozen=True):
    """Shape, strides (both in elements, possibly symbolic) and dtype of a tensor."""

    shape: list[Size]
    stride: list[Size]
    dtype: str


class Node(Struct, frozen=True):
    """One operation. `name` is unique in the graph; a node with several results returns a tuple
    that `getitem` nodes take apart."""

    name: str
    op: str
    args: list[Arg] = []
    kwargs: dict[str, Arg] = {}
    no_grad: bool = False  # traced under torch.no_grad()
    autocast: Autocast | None = None
    random: bool = False  # draws from the default generator
    #: where it does: what the tensors that it takes look like, each name once, in order
    drawn: list[TensorSpec] = []
    module: str = ""  # "transformer.h.0.attn"
    location: str = ""  # "modeling_gpt2.py:123"
    checkpoint: list[Integer] = []  # ids of the user's checkpoint blocks around it, outermost first


class Symbol(Struct, frozen=True):
    """A dynamic dimension: the bounds that the trace found and the size that is planned."""

    minimum: Integer
    maximum: Integer
    planned: Integer


class Parameter(Struct, frozen=True):
    """A parameter, buffer or constant: one tensor, however many names it goes by.

    `name` is the first of `names` in registration order and identifies it everywhere. Tied weights
    are one Parameter with several names. `literal` holds a constant's value (base64 of its bytes).
    """

    name: str
    names: list[str]
    spec: TensorSpec
    role: str  # "parameter" | "buffer" | "constant"
    requires_grad: bool = False
    persistent: bool = True  # part of the state dict
    literal: str | None = None
    #: dtype of its initial value before the precision cast: fp32 masters are made from it
    initial_dtype: str = "float32"


class Value(Struct, frozen=True):
    """A tensor that crosses regions, or a graph input or output."""

    name: str  # the node's name, or the input's
    spec: TensorSpec
    producer: Integer  # region index; -1 for a graph input
    consumers: list[Integer]  # region indices, ascending
    requires_grad: bool = False
    #: values of the same set share storage (views of one another)
    alias_set: Integer = -1


class Region(Struct, frozen=True):
    """A run of consecutive nodes planned as one: nodes[start:end]."""

    name: str
    kind: Integer  # equal structure, shapes and dtypes: equal kind
    start: Integer
    end: Integer
    inputs: list[str]  # value names
    outputs: list[str]  # value names, produced here, read later or returned
    parameters: list[str]  # parameters and buffers read here, in order of first use
    gradients: list[str] = []  # parameters that receive a gradient here
    mutates: list[str] = []  # buffers written here
    random: bool = False
    checkpoint: Integer = -1  # a user's checkpoint block: always recomputed; -1 when not


class InputSpec(Struct, frozen=True):
    """One tensor of the batch. `path` finds it in the structured input:
    ["kwargs", "labels"], ["args", 0, "mask"]."""

    name: str
    path: list[str | Integer]
    spec: TensorSpec


class OutputSpec(Struct, frozen=True):
    """One tensor that forward returns. `path` as in InputSpec, without args/kwargs."""

    name: str
    path: list[str | Integer]


class InitialOp(Struct, frozen=True):
    """One operator that ran while the model was built, in order: the history of initial values."""

    results: list[str]
    op: str
    args: list[Arg] = []
    kwargs: dict[str, Arg] = {}
    random: bool = False
    dtypes: list[str] = []
    shapes: list[list[Integer]] = []


class Initial(Struct, frozen=True):
    """How initial values are made.

    source "replay": run `ops` in order after `torch.manual_seed(seed)`, keeping only what a target
    needs; `targets` maps a parameter's name to the name of its tensor on the tape.
    source "safetensors": read `files` from `folder`; `targets` maps a parameter's name to the
    tensor's key. Parameters absent from the files keep their replayed value.
    source "live": given by the caller's own module.
    """

    source: str  # "replay" | "safetensors" | "live"
    ops: list[InitialOp] = []
    targets: dict[str, str] = {}
    folder: str = ""
    files: list[str] = []
    keys: dict[str, str] = {}
    #: the only seed that the record holds for (the constructor branched on drawn numbers); None: any
    seed: Integer | None = None


class RegionGraph(Struct, frozen=True):
    model: str
    mode: str  # "train" | "eval"
    precision: str  # "fp32" | "bf16" | "fp16"
    symbols: dict[str, Symbol]
    inputs: list[InputSpec]
    outputs: list[OutputSpec]
    loss: str  # name of the scalar to minimise
    nodes: list[Node]
    regions: list[Region]
    values: list[Value]
    parameters: list[Parameter]
    initial: Initial
    #: model configuration to write beside exported weights (Hugging Face config.json), or None
    export_config: str | None = None


BYTES_PER_ELEMENT = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


def evaluate_size(size: Size, symbols: dict[str, int]) -> int:
    """The integer that `size` stands for, given the value of each symbol."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return symbols[size]
    left, right = evaluate_size(size.left, symbols), evaluate_size(size.right, symbols)
    return SIZE_OPERATORS[size.operator](left, right)


SIZE_OPERATORS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "max": max,
    "min": min,
}


def planned_sizes(graph: RegionGraph) -> dict[str, int]:
    """The planned size of every symbol."""
    return {name: symbol.planned for name, symbol in graph.symbols.items()}


def element_count(spec: TensorSpec, symbols: dict[str, int]) -> int:
    count = 1
    for size in spec.shape:
        count *= evaluate_size(size, symbols)
    return count


def storage_bytes(spec: TensorSpec, symbols: dict[str, int]) -> int:
    """Bytes that the tensor spans in its storage (elements between the first and the last)."""
    return storage_elements(spec, symbols) * BYTES_PER_ELEMENT[spec.dtype]


def storage_elements(spec: TensorSpec, symbols: dict[str, int]) -> int:
    """Elements between the first and the last, both included."""
    shape = [evaluate_size(size, symbols) for size in spec.shape]
    stride = [evaluate_size(size, symbols) for size in spec.stride]
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
