"""Cuts the nodes into regions.

Cuts follow the module tree (blocks.py); small neighbours outside blocks are merged. The loss, which
has no weights, is a region of its own, so that the output head's weight and the loss's temporaries
never coexist. No cut separates a change in place from an alias of what it changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stages.artifacts.errors import TraceError
from stages.region.interpreter import node_references
from stages.trace import blocks
from stages.trace.blocks import Tree
from stages.trace.nodes import Traced
from stages.trace.rehearsal import Facts

#: merged weights may exceed the largest unit's by this factor: a norm joins the head, positions the embedding
_SLACK = 1.25


@dataclass(frozen=True)
class Program:
    """What cutting needs. `stored` names parameters, buffers and constants: all that is no value."""

    nodes: Sequence[Traced]
    facts: Facts
    tree: Tree
    stored: frozenset[str]


def cut(program: Program, granularity: str) -> list[int]:
    """Start of each region, ascending, the first 0.

    Raises:
        TraceError: A checkpoint block and a change in place overlap such that no cut is right.
    """
    nodes = program.nodes
    if not nodes:
        return [0]
    allowed = set(range(1, len(nodes))) - _blocked(program)
    forced = {i for i in range(1, len(nodes)) if nodes[i].node.checkpoint != nodes[i - 1].node.checkpoint}
    for position in sorted(forced - allowed):
        raise TraceError(
            f"{nodes[position].node.location}: module {nodes[position].node.module!r}: a checkpoint "
            f"block begins or ends between a change in place and another use of the same tensor. "
            f"Expected blocks that change only their own tensors"
        )
    units = blocks.units(nodes, program.tree, granularity)
    loss = _loss_start(program)
    borders = {i for i in range(1, len(nodes)) if units[i] != units[i - 1]} | loss
    borders = {i for i in borders & allowed if not nodes[i].node.checkpoint}
    return _merged(program, sorted({0} | borders | forced), units, forced | loss)


def _blocked(program: Program) -> set[int]:
    """Positions before which there must be no cut."""
    blocked: set[int] = set()
    for first, last in (*_alias_spans(program), *_tuple_spans(program)):
        blocked.update(range(first + 1, last + 1))
    return blocked


def _alias_spans(program: Program) -> Iterable[tuple[int, int]]:
    """Stretches of nodes that stay in one region because of shared storage.

    A tensor that is changed in place: from its making to its last change (what reads it later sees it
    finished). A view of a weight or of a changing buffer: all its uses, since the bytes may leave, or
    change, between regions.
    """
    storage = program.facts.storage
    touched: dict[int, list[int]] = defaultdict(list)
    changed: dict[int, int] = {}
    for index, traced in enumerate(program.nodes):
        written = {storage[name] for name in traced.writes}
        # what an in-place operator gives back is its target under another name, which nothing reads
        own = () if storage[traced.node.name] in written else (traced.node.name,)
        for name in (*own, *node_references(traced.node)):
            if name not in program.stored and storage[name] >= 0:
                touched[storage[name]].append(index)
        changed.update(dict.fromkeys(written, index))
    stored = {storage[name] for name in program.stored}
    weights = {storage[name] for name in program.tree.weights}
    for number, indices in touched.items():
        if number in weights or (number in changed and number in stored):
            yield min(indices), max(indices)
        elif number in changed:
            yield min(indices), changed[number]


def _tuple_spans(program: Program) -> Iterable[tuple[int, int]]:
    """A node with several results stays with the nodes that take it apart."""
    made = {traced.node.name: index for index, traced in enumerate(program.nodes)}
    for index, traced in enumerate(program.nodes):
        if traced.node.op == "getitem":
            yield made[next(node_references(traced.node))], index


def _loss_start(program: Program) -> set[int]:
    """The node after the last that reads a weight, if there is one; what follows is the loss."""
    readers = [index for index, traced in enumerate(program.nodes) if program.tree.reads_weight(traced)]
    return {readers[-1] + 1} if readers and readers[-1] < len(program.nodes) - 1 else set()


def _merged(program: Program, starts: list[int], units: list[blocks.Unit], kept: set[int]) -> list[int]:
    """Merges neighbours outside blocks while their weights together do not exceed the largest unit's.

    Units without weights join the one before them, or at the front the one after; borders in `kept` stay.
    """
    ends = [*starts[1:], len(program.nodes)]
    weights = [_weights(program, start, end) for start, end in zip(starts, ends, strict=True)]
    sizes = [sum(program.tree.weights[name] for name in names) for names in weights]
    limit = max(sizes) * _SLACK
    result, held, in_block = [starts[0]], set(weights[0]), bool(units[starts[0]][0])
    for start, own in zip(starts[1:], weights[1:], strict=True):
        together = sum(program.tree.weights[name] for name in held | own)
        is_block = bool(units[start][0])
        small = not (in_block or is_block) and together <= limit
        if start not in kept and (not held or not own or small):
            held |= own
            in_block |= is_block
        else:
            result.append(start)
            held, in_block = set(own), is_block
    return result


def _weights(program: Program, start: int, end: int) -> set[str]:
    names = (name for traced in program.nodes[start:end] for name in node_references(traced.node))
    return {name for name in names if name in program.tree.weights}
