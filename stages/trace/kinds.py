"""Regions of equal structure: same operators, shapes, dtypes and gradients under other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from stages.artifacts import graph as g


def renamed(arg: g.Arg, names: Mapping[str, str]) -> g.Arg:
    """`arg` with every reference renamed."""
    if isinstance(arg, g.Ref):
        return g.Ref(names[arg.name])
    if isinstance(arg, list):
        return [renamed(item, names) for item in arg]  # type: ignore[misc]
    return arg


def signature(
    region: g.Region,
    nodes: Sequence[g.Node],
    values: Mapping[str, g.Value],
    parameters: Mapping[str, g.Parameter],
) -> bytes:
    """Equal for two regions exactly when one's costs are the other's."""
    names: dict[str, str] = {}
    for prefix, group in (
        ("i", region.inputs),
        ("p", region.parameters),
        ("n", [node.name for node in nodes]),
    ):
        names.update({name: f"{prefix}{index}" for index, name in enumerate(group)})
    body = [
        msgspec.structs.replace(
            node,
            name=names[node.name],
            args=[renamed(arg, names) for arg in node.args],
            kwargs={key: renamed(arg, names) for key, arg in node.kwargs.items()},
            module="",
            location="",
            checkpoint=[0] * len(node.checkpoint),
        )
        for node in nodes
    ]
    content: list[Any] = [
        body,
        [_of_value(values[name]) for name in region.inputs],
        [_of_parameter(parameters[name]) for name in region.parameters],
        [[names[name], _of_value(values[name])] for name in region.outputs],
        [names[name] for name in region.gradients],
        [names[name] for name in region.mutates],
        _aliases([values[name].alias_set for name in (*region.inputs, *region.outputs)]),
        [region.random, region.checkpoint >= 0],
    ]
    return msgspec.json.encode(content)


def _of_value(value: g.Value) -> list[Any]:
    return [value.spec, value.requires_grad]


def _of_parameter(parameter: g.Parameter) -> list[Any]:
    return [parameter.spec, parameter.role, parameter.requires_grad]


def _aliases(sets: Sequence[int]) -> list[int]:
    """Which of the values share storage, whatever the numbers of their sets."""
    return [-1 if number < 0 else sets.index(number) for number in sets]
