"""Whether a batch may be cut into slices: each region is run on a few rows, whole and in slices.

What must agree is outputs, gradients and the loss. One region is held at a time, on stand-in weights,
with dropout off, in double precision where that takes little memory, and with unequal numbers of
targets in the rows. What mixes rows (batch norm, in-batch contrastive losses, losses that balance
experts over the batch) shows itself by disagreeing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.artifacts.slicing import BATCH, LOSSES
from stages.region import autograd
from stages.region.interpreter import RegionFunction
from stages.region.targets import Targets
from stages.trace.profile import double
from stages.trace.profile.few_rows import Rows, few_sizes, input_rows, weight_like

_SLICES = (1, 3)  # rows: unequal, so that means over rows and sums differ
_ROWS = sum(_SLICES)
#: elements of a gradient, which is as large as its weight, that are looked at together
_PIECE_ELEMENTS = 1 << 20

_WAY_OUT = (
    "Use train.micro_batches=1, or, if you know better, declare how the losses of slices make the batch's: "
    "train.loss=mean, token_mean or sum"
)


class _MixesError(Exception):
    """A region gives other results for slices than for the whole."""


def loss_of_slices(graph: g.RegionGraph, declared: str, *, may_run: bool = True) -> str:
    """How the losses of slices make the batch's loss: "mean", "token_mean" or "sum".

    Args:
        declared: `train.loss`; "auto" runs the model's regions to find out.
        may_run: Whether there is a machine to run them on.

    Raises:
        ConfigError: They do not, or it cannot be found out; says why and what to do.
    """
    mutated = next((name for region in graph.regions for name in region.mutates), None)
    if mutated is not None:
        raise _refusal(
            f"the model changes {mutated} in forward (running statistics): slices would change it once each, "
            f"and normalise by their own rows. Use train.micro_batches=1, or a norm that does not look at "
            f"other rows"
        )
    if declared == "token_mean":
        Targets(graph)
    if declared != "auto":
        return declared
    if not may_run:
        raise _refusal(f"nothing is run for hardware that is not there, so nobody has found out. {_WAY_OUT}")
    if BATCH not in graph.symbols:
        raise _refusal(f"the trace holds for one batch size only. {_WAY_OUT}")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Check(graph).run()
    except _MixesError as error:
        raise _refusal(f"{error}. {_WAY_OUT}") from error
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # operators raise what they like
        raise _refusal(
            f"a trial on a few rows failed ({type(error).__name__}: {error}). {_WAY_OUT}"
        ) from error


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"the batch cannot be cut into micro-batches: {why}",
        key="train.micro_batches",
        found="a batch in slices",
        expected="a loss that its slices make up",
    )


@dataclass
class _Trial:
    """One region's results on some rows."""

    outputs: dict[str, torch.Tensor]
    tape: autograd.Tape
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)


class _Check:
    """Goes through the regions in order; the values between them are real where they steer (integers,
    masks), else random."""

    def __init__(self, graph: g.RegionGraph) -> None:
        self._graph = graph
        self._values = {value.name: value for value in graph.values}
        self._rows = Rows(graph, few_sizes(graph, _ROWS))
        self._targets = _targets_of(graph)
        self._present = input_rows(graph, self._rows, self._targets)
        self._loss = ""

    def run(self) -> str:
        seen: set[int] = set()
        for region in self._graph.regions:
            steers = any(
                not self._values[name].spec.dtype.startswith(double.FLOATS) for name in region.outputs
            )
            if region.kind in seen and not steers:
                for name in region.outputs:
                    self._present[name] = self._rows.random(self._values[name].spec)
                continue
            seen.add(region.kind)
            self._region(region)
        if not self._loss:
            raise _MixesError("no region computes the loss")
        return self._loss

    def _region(self, region: g.Region) -> None:
        graph = double.in_double(self._graph, region)
        function = RegionFunction(graph, region, torch.device("cpu"))
        parameters = {item.name: item for item in graph.parameters}
        weights = {name: weight_like(parameters[name], self._rows.sizes) for name in region.parameters}
        inputs = {name: double.cast(self._present[name], graph) for name in region.inputs}
        wanted = frozenset(name for name in region.inputs if self._values[name].requires_grad)
        wanted |= frozenset(region.gradients)

        def trial(tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> _Trial:
            held = {**tensors, **weights}
            outputs, tape = autograd.forward(
                function, held, sizes, gradients_of=wanted, keep=True, lookup=held.__getitem__
            )
            return _Trial(outputs, tape)

        whole = trial(inputs, self._rows.sizes)
        parts = [trial(self._rows.cut(inputs, rows), self._rows.sizes_of(rows)) for rows in _spans()]
        self._compare_outputs(region, whole, parts)
        self._compare_gradients(region, whole, parts)
        self._present.update(whole.outputs)

    def _compare_outputs(self, region: g.Region, whole: _Trial, parts: list[_Trial]) -> None:
        for name, output in whole.outputs.items():
            found = [part.outputs[name] for part in parts]
            if name == self._graph.loss:
                self._loss = self._kind_of_loss(output, found)
                continue
            for rows, part in zip(_spans(), found, strict=True):
                expected = self._rows.cut({name: output}, rows)[name]
                if not _agree(part, expected):
                    raise _MixesError(
                        self._mixing(region, f"{name} of a slice differs from that of the batch")
                    )

    def _mixing(self, region: g.Region, what: str) -> str:
        node = self._graph.nodes[region.start]
        place = f" ({node.location})" if node.location else ""
        return (
            f"region {region.name}{place} mixes rows: {what}, as with batch norm without running statistics, "
            f"losses that compare or balance rows, or unequal numbers of targets"
        )

    def _kind_of_loss(self, whole: torch.Tensor, parts: list[torch.Tensor]) -> str:
        for kind in (LOSSES[1], LOSSES[0], LOSSES[2]):
            weights = self._weights(kind)
            if weights is not None:
                total = torch.stack([w * part for w, part in zip(weights, parts, strict=True)]).sum(0)
                if _agree(total, whole):
                    return kind
        raise _MixesError(
            "the batch's loss is neither the mean over rows, nor over targets, nor the sum of the losses of "
            "its slices (a contrastive loss, a loss that balances experts, class weights, ...)"
        )

    def _weights(self, kind: str) -> list[float] | None:
        if kind == "sum":
            return [1.0] * len(_SLICES)
        if kind == "mean":
            return [rows / _ROWS for rows in _SLICES]
        if self._targets is None:
            return None
        counts = []
        for rows in _spans():
            inputs = self._rows.cut(
                {item.name: self._present[item.name] for item in self._graph.inputs}, rows
            )
            counts.append(self._targets.count(inputs, self._rows.sizes_of(rows), self._constant))
        return [count / sum(counts) for count in counts]

    def _constant(self, name: str) -> torch.Tensor:
        parameter = next(item for item in self._graph.parameters if item.name == name)
        return weight_like(parameter, self._rows.sizes)

    def _compare_gradients(self, region: g.Region, whole: _Trial, parts: list[_Trial]) -> None:
        """Random gradients of outputs go back, whole and cut; what comes out must be cut alike."""
        sent = {name: self._cotangent(whole.outputs[name], name) for name in whole.tape.outputs}
        if not sent:
            return
        gradients = autograd.backward(whole.tape, sent, {})
        left = _own(gradients, sent)
        # a gradient may be zero but for rounding (a key's bias, which softmax does not see)
        largest = max((_largest(item) for item in left.values()), default=0.0)
        for number, (rows, part) in enumerate(zip(_spans(), parts, strict=True)):
            cut = {name: self._cut_cotangent(name, sent[name], number, rows) for name in part.tape.outputs}
            for name, gradient in autograd.backward(part.tape, cut, {}).items():
                if gradient is not None and name in left:
                    self._rows.part(left, name, rows).sub_(gradient)
        for name, rest in left.items():
            if not _largest(rest) <= double.tolerance(rest) * largest:  # a nan is not
                raise _MixesError(
                    self._mixing(region, f"the gradient of {name} is not made up by those of slices")
                )

    def _cotangent(self, output: torch.Tensor, name: str) -> torch.Tensor:
        return torch.ones_like(output) if name == self._graph.loss else torch.randn_like(output)

    def _cut_cotangent(self, name: str, sent: torch.Tensor, number: int, rows: range) -> torch.Tensor:
        if name == self._graph.loss:
            weights = self._weights(self._loss)
            assert weights is not None, "the loss's kind has weights"
            return sent * weights[number]
        if self._rows.dimension(self._values[name].spec) is None:
            return sent * (len(rows) / _ROWS)
        return self._rows.cut({name: sent}, rows)[name].contiguous()


def _targets_of(graph: g.RegionGraph) -> Targets | None:
    try:
        return Targets(graph)
    except ConfigError:
        return None  # a loss of another form, which may be a mean over rows or a sum


def _spans() -> Iterator[range]:
    first = 0
    for rows in _SLICES:
        yield range(first, first + rows)
        first += rows


def _own(
    gradients: Mapping[str, torch.Tensor | None], sent: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`gradients`, each in memory of its own that may be written to: a sum sends what it got to both its
    terms. Most are, and a large weight's is not copied."""
    found: dict[str, torch.Tensor] = {}
    seen = {tensor.untyped_storage().data_ptr() for tensor in sent.values()}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        place = gradient.untyped_storage().data_ptr()
        alone = place not in seen and gradient.is_contiguous()
        seen.add(place)
        found[name] = gradient if alone else gradient.clone()
    return found


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; nan where there is one."""
    parts = [part.abs().max() for part in tensor.flatten().split(_PIECE_ELEMENTS) if part.numel()]
    return float(torch.stack(parts).max()) if parts else 0.0


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are equal but for rounding, relative to the largest element."""
    if found.shape != expected.shape:
        return False
    if not found.is_floating_point():
        return bool(torch.equal(found, expected))
    infinite = torch.isinf(expected)  # additive masks
    if not torch.equal(torch.where(infinite, expected, 0), torch.where(torch.isinf(found), found, 0)):
        return False
    here, there = found[~infinite], expected[~infinite]
    largest = float(there.abs().max()) if there.numel() else 0.0
    return bool(((here - there).abs() <= double.tolerance(found) * largest).all())
