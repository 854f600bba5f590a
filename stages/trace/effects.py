"""What operators do beyond their results: changes in place, and random draws."""

from __future__ import annotations

import re
from typing import Any

import torch

from stages.artifacts import graph as g
from stages.region import operators
from stages.region.interpreter import node_references

#: operators that write running statistics without saying so in their schema: arguments written,
#: and the argument that switches it on
_SILENT_WRITES = {
    "aten.batch_norm.default": ((3, 4), 5),
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.instance_norm.default": ((3, 4), 5),
}


def written(op: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[tuple[str, ...], str | None]:
    """Names that a node changes in place, and the one among them that it gives back."""
    if op == "getitem":
        return (), None
    names: list[str] = []
    returned: str | None = None
    schema = operators.overload(op)._schema
    for position, argument in enumerate(schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if argument.alias_info is None or not argument.alias_info.is_write or not isinstance(value, g.Ref):
            continue
        names.append(value.name)
        if len(schema.returns) == 1 and schema.returns[0].alias_info is not None:
            returned = value.name
    positions, switch = _SILENT_WRITES.get(op, ((), 0))
    if positions and args[switch] is True:
        names += [args[position].name for position in positions if isinstance(args[position], g.Ref)]
    return tuple(names), returned


def is_random(op: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a node draws from the generator; dropout does not when off or of probability zero."""
    if op == "getitem" or torch.Tag.nondeterministic_seeded not in operators.overload(op).tags:
        return False
    for position, argument in enumerate(operators.overload(op)._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        if argument.name in ("p", "dropout_p", "dropout") and isinstance(value, (int, float)) and value == 0:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True


#: operators whose weights autocast casts to its dtype
_AUTOCAST = re.compile(r"aten\.(linear|matmul|mm|bmm|addmm|baddbmm|addbmm|einsum|conv\w*|lstm|gru|rnn_\w+)\.")


def cast_by_autocast(node: g.Node) -> list[str]:
    """Names that autocast casts for this operator, where it is on; it keeps casts of weights for reuse."""
    on = node.autocast is not None and node.autocast.enabled and not node.no_grad
    return list(node_references(node)) if on and _AUTOCAST.match(node.op) else []


def sends_sparse_gradient(op: str, args: list[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a node asks for a sparse gradient of its weight, as embeddings can."""
    if op == "getitem":
        return False
    for position, argument in enumerate(operators.overload(op)._schema.arguments):
        if argument.name == "sparse":
            return (args[position] if position < len(args) else kwargs.get("sparse")) is True
    return False
