"""Which nodes belong together by the module tree: calls of repeated blocks, and the stretches between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.region.interpreter import node_references
from stages.trace.nodes import Traced

#: a unit of nodes: a module's path and the number of its call, or ("", n) outside blocks
Unit = tuple[str, int]

#: with granularity "fine", a child of a block is a unit of its own from this share of the block's weights
_CHILD_SHARE = 8

#: a block with blocks inside is opened if it holds more than one part in this many of all weights
_STAGE_SHARE = 4


@dataclass(frozen=True)
class Modules:
    """The model's module tree."""

    classes: Mapping[str, str]  # class of each module, by path
    ordered: frozenset[str]  # paths of ModuleList, ModuleDict and Sequential containers


class Tree:
    """Bytes of weights under each module path."""

    def __init__(self, modules: Modules, weight_bytes: Mapping[str, int]) -> None:
        self.modules = modules
        self.weights = weight_bytes
        self.bytes_under: dict[str, int] = defaultdict(int)
        for name, size in weight_bytes.items():
            path = name.rpartition(".")[0]
            while path:
                self.bytes_under[path] += size
                path = path.rpartition(".")[0]
        self.parents = {path.rpartition(".")[0] for path in modules.classes if path}

    def is_block(self, path: str) -> bool:
        """Whether the module is composed of others and holds weights: a layer, not a matrix."""
        return path in self.parents and self.bytes_under.get(path, 0) > 0

    def reads_weight(self, traced: Traced) -> bool:
        return any(name in self.weights for name in node_references(traced.node))


def units(nodes: Sequence[Traced], tree: Tree, granularity: str) -> list[Unit]:
    """The unit of each node; equal neighbours belong together."""
    blocks = find_blocks(nodes, tree)
    found: list[Unit] = []
    for traced in nodes:
        found.append(next(((path, call) for path, call in traced.stack if path in blocks), ("", 0)))
    if granularity == "fine":
        found = _children(nodes, tree, found)
    return _with_stretches(nodes, tree, found)


def find_blocks(nodes: Sequence[Traced], tree: Tree) -> set[str]:
    """Paths of repeated blocks: several of one class in one container, or one that is called again."""
    calls: dict[str, set[int]] = defaultdict(set)
    for traced in nodes:
        for path, call in traced.stack:
            calls[path].add(call)
    families: dict[tuple[str, str], set[str]] = defaultdict(set)
    for path in filter(tree.is_block, calls):
        container = path.rpartition(".")[0]
        if container in tree.modules.ordered or _is_numbered(path):
            families[container, tree.modules.classes[path]].add(path)
    repeated = {path for family in families.values() if len(family) > 1 for path in family}
    repeated |= {path for path, numbers in calls.items() if len(numbers) > 1 and tree.is_block(path)}
    return _outermost(tree, repeated)


def _is_numbered(path: str) -> bool:
    """Whether it is one of "layer1", "layer2", ...: one parent they are a family as well."""
    return path[-1:].isdigit()


def _outermost(tree: Tree, repeated: set[str]) -> set[str]:
    """Blocks that lie in no other, save that a heavy stage of several blocks is opened."""
    total = sum(tree.weights.values())
    chosen: set[str] = set()
    for path in sorted(repeated, key=lambda path: path.count(".")):
        if any(path.startswith(outer + ".") for outer in chosen):
            continue
        inside = sum(1 for other in repeated if other.startswith(path + "."))
        if inside < 2 or tree.bytes_under[path] * _STAGE_SHARE <= total:
            chosen.add(path)
    return chosen


def _children(nodes: Sequence[Traced], tree: Tree, blocks: list[Unit]) -> list[Unit]:
    """Splits each block call at its heavy children (attention, MLP).

    What a block computes itself joins the child before it (dropout, residual addition), but from the
    first weight on (a norm) the child after it.
    """
    readers = _readers(nodes, tree)
    result = list(blocks)
    waiting: list[int] = []
    for index, (block, traced) in enumerate(zip(blocks, nodes, strict=True)):
        if index and blocks[index - 1] != block:
            waiting = []
        child = _heavy_child(tree, block, traced)
        before = result[index - 1] if index and blocks[index - 1] == block else block
        if not block[0]:
            continue
        if child is not None:
            result[index] = child
            for earlier in waiting:
                result[earlier] = child
            waiting = []
            continue
        result[index] = before
        if waiting or before == block or _innermost(traced) in readers:
            waiting.append(index)
    return result


def _heavy_child(tree: Tree, block: Unit, traced: Traced) -> Unit | None:
    path, call = block
    child = next((inner for inner, _ in traced.stack if path and inner.startswith(path + ".")), None)
    if child is None or tree.bytes_under[child] * _CHILD_SHARE < tree.bytes_under[path]:
        return None
    return child, call


def _with_stretches(nodes: Sequence[Traced], tree: Tree, blocks: list[Unit]) -> list[Unit]:
    """Nodes outside blocks: a new unit where a module that reads weights begins.

    What no such module computes goes on with the unit before it.
    """
    readers = _readers(nodes, tree)
    result: list[Unit] = []
    number = 0
    owner: Unit | None = None
    current: Unit = ("", 0)
    for block, traced in zip(blocks, nodes, strict=True):
        if block[0]:
            current, owner = block, None
        elif (
            _innermost(traced) in readers
            and _innermost(traced) != owner
            and (tree.reads_weight(traced) or traced.stack)  # the root itself starts at a weight
        ):
            number += 1
            current, owner = ("", number), _innermost(traced)
        result.append(current)
    return result


def _readers(nodes: Sequence[Traced], tree: Tree) -> set[Unit]:
    """Module calls that read weights themselves, not only through others."""
    return {_innermost(traced) for traced in nodes if tree.reads_weight(traced)}


def _innermost(traced: Traced) -> Unit:
    return traced.stack[-1] if traced.stack else ("", 0)
