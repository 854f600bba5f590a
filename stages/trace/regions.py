"""Regions, and the values that cross them, from nodes and cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from stages.artifacts import graph as g
from stages.region.interpreter import node_references
from stages.trace import kinds
from stages.trace.blocks import Unit
from stages.trace.nodes import Traced
from stages.trace.rehearsal import Facts


def build(
    nodes: Sequence[Traced],
    starts: Sequence[int],
    units: Sequence[Unit],
    parameters: Mapping[str, g.Parameter],
    inputs: Mapping[str, g.TensorSpec],
    outputs: Iterable[str],
    facts: Facts,
) -> tuple[list[g.Region], list[g.Value]]:
    """Regions in order, and all values: the batch's tensors first, then by producer.

    Args:
        starts: First node of each region.
        outputs: Names of what the graph returns.
    """
    if not nodes:
        return [], _values([], nodes, inputs, set(outputs), facts)
    ends = [*starts[1:], len(nodes)]
    returned = set(outputs)
    last_read = {name: index for index, traced in enumerate(nodes) for name in node_references(traced.node)}
    regions = []
    for start, end in zip(starts, ends, strict=True):
        regions.append(_region(nodes, start, end, parameters, returned, last_read, facts))
    regions = _named(regions, nodes, units)
    values = _values(regions, nodes, inputs, returned, facts)
    return _with_kinds(regions, nodes, values, parameters), values


def _region(
    nodes: Sequence[Traced], start: int, end: int, parameters: Mapping[str, g.Parameter], returned: set[str],
    last_read: Mapping[str, int], facts: Facts,
) -> g.Region:  # fmt: skip
    inside = nodes[start:end]
    made = {traced.node.name for traced in inside}
    read = list(dict.fromkeys(name for traced in inside for name in node_references(traced.node)))
    stored = [name for name in read if name in parameters]
    receiving = {name for index, name in facts.receives if start <= index < end}
    changed = {facts.storage[name] for traced in inside for name in traced.writes}
    return g.Region(
        name="",
        kind=-1,
        start=start,
        end=end,
        inputs=[name for name in read if name not in parameters and name not in made],
        outputs=[
            t.node.name for t in inside if last_read.get(t.node.name, -1) >= end or t.node.name in returned
        ],
        parameters=stored,
        gradients=[name for name in stored if name in receiving],
        mutates=[name for name in stored if facts.storage[name] in changed],
        random=any(traced.node.random for traced in inside),
        checkpoint=inside[0].node.checkpoint[-1] if inside[0].node.checkpoint else -1,
    )


def _named(regions: list[g.Region], nodes: Sequence[Traced], units: Sequence[Unit]) -> list[g.Region]:
    """Names from the module tree; a block's second call is "path@1"."""
    used: Counter[str] = Counter()
    result = []
    for region in regions:
        name = _name(region, nodes, units)
        used[name] += 1
        unique = name if used[name] == 1 else f"{name}@{used[name] - 1}"
        result.append(msgspec.structs.replace(region, name=unique))
    return result


def _name(region: g.Region, nodes: Sequence[Traced], units: Sequence[Unit]) -> str:
    block = next((units[index][0] for index in range(region.start, region.end) if units[index][0]), "")
    if block:
        return block
    if region.end == len(nodes) and not region.gradients:
        return "loss"
    inside = [traced.node for traced in nodes[region.start : region.end]]
    readers = [node.module for node in inside if set(region.parameters) & set(node_references(node))]
    return next(
        (module for module in [*reversed(readers), *(node.module for node in inside)] if module), "region"
    )


def _values(
    regions: Sequence[g.Region], nodes: Sequence[Traced], inputs: Mapping[str, g.TensorSpec],
    returned: set[str], facts: Facts,
) -> list[g.Value]:  # fmt: skip
    specs = {traced.node.name: traced.specs[0] for traced in nodes if traced.specs} | dict(inputs)
    producer = dict.fromkeys(inputs, -1)
    producer |= {name: index for index, region in enumerate(regions) for name in region.outputs}
    sharing = Counter(facts.storage[name] for name in producer)
    numbers: dict[int, int] = {}
    values = []
    for name, index in producer.items():
        storage = facts.storage[name]
        shared = sharing[storage] > 1
        values.append(
            g.Value(
                name=name,
                spec=specs[name],
                producer=index,
                consumers=[i for i, region in enumerate(regions) if name in region.inputs],
                requires_grad=name in facts.requires_grad,
                alias_set=numbers.setdefault(storage, len(numbers)) if shared else -1,
            )
        )
    return values


def _with_kinds(
    regions: Sequence[g.Region], nodes: Sequence[Traced], values: Sequence[g.Value],
    parameters: Mapping[str, g.Parameter],
) -> list[g.Region]:  # fmt: skip
    by_name = {value.name: value for value in values}
    known: dict[bytes, int] = {}
    result = []
    for region in regions:
        inside = [traced.node for traced in nodes[region.start : region.end]]
        kind = known.setdefault(kinds.signature(region, inside, by_name, parameters), len(known))
        result.append(msgspec.structs.replace(region, kind=kind))
    return result
