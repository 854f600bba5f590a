"""How many targets a mean cross entropy counts, from the batch alone.

The part of the graph that makes the loss's targets from the batch (shifts, views) is run by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.region.interpreter import RegionFunction, node_references

#: change shape or dtype of a scalar, not its value
_PASSING = ("view", "reshape", "_to_copy", "to", "clone", "alias", "squeeze", "contiguous")
_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_MEAN = 1


class Targets:
    """The targets of `graph`'s loss.

    Raises:
        ConfigError: The loss is no mean over targets that are made from the batch alone.
    """

    def __init__(self, graph: g.RegionGraph) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._given = {spec.name for spec in graph.inputs}
        self._kept = {parameter.name for parameter in graph.parameters if parameter.role != "parameter"}
        loss = self._loss_node(graph.loss)
        values = dict(enumerate(loss.args))
        names = ("self", "target", "weight", "reduction", "ignore_index")
        arguments = {name: loss.kwargs.get(name, values.get(index)) for index, name in enumerate(names)}
        target = arguments["target"]
        if arguments["weight"] is not None or arguments["reduction"] not in (None, _MEAN):
            raise self._refuse("weighs its targets, or is no mean")
        if not isinstance(target, g.Ref):
            raise self._refuse("has no targets")
        ignored = arguments["ignore_index"]
        self.ignored = ignored if isinstance(ignored, int) else -100
        #: inputs of the batch that targets are made from
        self.inputs: set[str] = set()
        self._target = target.name
        self._function = self._part(graph, target.name)

    def count(
        self,
        inputs: Mapping[str, torch.Tensor],
        sizes: dict[str, int],
        lookup: Callable[[str], torch.Tensor],
    ) -> int:
        """Targets of a batch that are not ignored."""
        if self._function is None:
            target = inputs[self._target]
        else:
            constants = {name: lookup(name) for name in self._function.region.parameters}
            with torch.no_grad():
                target = self._function({**inputs, **constants}, sizes)[self._target]
        if target.is_floating_point():
            raise self._refuse("takes probabilities as targets")
        return int((target != self.ignored).sum())

    def _loss_node(self, name: str) -> g.Node:
        while True:
            node = self._nodes.get(name)
            op = "" if node is None else node.op.split(".")[1]
            if node is not None and op in _LOSSES:
                return node
            if node is None or op not in _PASSING or not isinstance(node.args[0], g.Ref):
                raise self._refuse("is not the result of one cross entropy")
            name = node.args[0].name

    def _part(self, graph: g.RegionGraph, target: str) -> RegionFunction | None:
        """The nodes that `target` depends on, as a region; None where it is the batch's own tensor."""
        needed, pending, constants = set[str](), [target], set[str]()
        while pending:
            name = pending.pop()
            if name in self._kept:
                constants.add(name)
            elif name in self._given:
                self.inputs.add(name)
            elif name not in needed:
                if name not in self._nodes or self._nodes[name].random:
                    raise self._refuse("has targets that are not made from the batch alone")
                needed.add(name)
                pending += node_references(self._nodes[name])
        if not needed:
            return None
        nodes = [node for node in graph.nodes if node.name in needed]
        region = g.Region("targets", -1, 0, len(nodes), sorted(self._given), [target], sorted(constants))
        return RegionFunction(msgspec.structs.replace(graph, nodes=nodes), region, torch.device("cpu"))

    @staticmethod
    def _refuse(why: str) -> ConfigError:
        return ConfigError(
            f"train.loss=token_mean does not fit this model: its loss {why}. Expected a mean cross entropy "
            f"over integer targets without class weights. Use train.loss=mean or sum, whichever it is, or "
            f"train.micro_batches=1",
            key="train.loss",
            found="token_mean",
            expected="mean or sum",
        )
