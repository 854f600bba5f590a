"""Where the sum of a weight's gradients over regions grows: inside the engine, or after it.

Inside is always right (see `stages.region.autograd`), but needs room for the sum so far, the new
gradient and their sum at once. Where a region sends a weight exactly one gradient, adding that to the sum
in place gives the same bits for one copy less: for a large tied embedding, the difference decides
the least budget.
"""

from __future__ import annotations

from collections import Counter

import torch

from stages.artifacts import graph as g
from stages.region.interpreter import node_references

#: operators whose backward sends each weight one gradient, in memory of its own
_ONE_GRADIENT_PER_USE = ("aten.linear.", "aten.embedding.", "aten.addmm.", "aten.mm.", "aten.layer_norm.")


def summed_in_engine(graph: g.RegionGraph, region: g.Region) -> frozenset[str]:
    """Weights of the region whose sum so far must be given to its backward: used more than once
    here, or by an operator that may send them several gradients."""
    uses: Counter[str] = Counter()
    several: set[str] = set()
    for node in graph.nodes[region.start : region.end]:
        for name in node_references(node):
            uses[name] += 1
            if not node.op.startswith(_ONE_GRADIENT_PER_USE):
                several.add(name)
    return frozenset(name for name in region.gradients if uses[name] > 1 or name in several)


def add_gradient(so_far: torch.Tensor, gradient: torch.Tensor, *, shares_memory: bool) -> torch.Tensor:
    """The sum of two gradients of one weight, in place where that is safe.

    Args:
        shares_memory: Whether `so_far` may be another tensor's gradient too: autograd hands one
            tensor to both sides of a sum, and a bias may get its output's gradient itself.
    """
    if shares_memory or gradient.dim() < 2:
        return so_far + gradient
    return so_far.add_(gradient)
