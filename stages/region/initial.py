"""Initial values: what the model's constructor would give, made one tensor at a time.

Constructors draw from one generator in one order, but a tensor's value depends only on its own
history. So one pass over all draws in their order makes each tensor when its draw comes up, and
draws whose numbers were overwritten later run into scratch memory, only to advance the generator.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from math import prod

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError
from stages.region import operators, safetensors_reader
from stages.region.interpreter import decode
from stages.region.tape import Tape

_CPU = torch.device("cpu")


def iterate_initial(graph: g.RegionGraph, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and initial value of every parameter, buffer and constant, in `initial_dtype`, on the CPU.

    Bitwise what `torch.manual_seed(seed)` and the constructor give, or what the files hold. The
    order is that of the constructor's draws. The caller's random state is left as it is.

    Raises:
        ArtifactError: The values are the caller's own ("live"), or the record is damaged.
    """
    replayed = dict(graph.initial.targets)
    for parameter in graph.parameters:
        if parameter.literal is not None:
            replayed.pop(parameter.name, None)
            yield parameter.name, decode_literal(parameter)
    if graph.initial.source == "safetensors":
        for name, tensor in safetensors_reader.read(graph):
            replayed.pop(name, None)
            yield name, tensor
    elif graph.initial.source != "replay":
        raise ArtifactError(
            f"initial values have the source {graph.initial.source!r}: they are the caller's own tensors. "
            f"Expected replay or safetensors; pass them in"
        )
    _check_complete(graph, replayed)
    if replayed and graph.initial.seed not in (None, seed):
        raise ArtifactError(
            f"the record of initial values holds for seed {graph.initial.seed} only; found seed {seed}. "
            f"Trace the model again with this seed"
        )
    yield from replay(graph.initial.ops, replayed, seed)


def _check_complete(graph: g.RegionGraph, replayed: dict[str, str]) -> None:
    known = set(replayed) | set(graph.initial.keys)
    for parameter in graph.parameters:
        if parameter.literal is None and parameter.name not in known:
            raise ArtifactError(f"{parameter.name} has no initial value in the record. Trace the model again")


def literal_constants(graph: g.RegionGraph) -> dict[str, torch.Tensor]:
    """The constants whose values the graph itself holds, by name."""
    return {
        parameter.name: decode_literal(parameter)
        for parameter in graph.parameters
        if parameter.literal is not None
    }


def decode_literal(parameter: g.Parameter) -> torch.Tensor:
    """The value of a constant that the artifact holds.

    Raises:
        ArtifactError: The bytes do not match shape and dtype.
    """
    sizes = [g.evaluate_size(size, {}) for size in parameter.spec.shape]
    tensor = tensor_from_text(parameter.literal or "", parameter.initial_dtype, sizes)
    strides = [g.evaluate_size(step, {}) for step in parameter.spec.stride]
    return tensor if list(tensor.stride()) == strides else _restride(tensor, strides)


def _restride(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, strides, strict=True)):
        return tensor  # an expanded constant is stored whole
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)


def tensor_from_text(text: str, dtype: str, shape: list[int]) -> torch.Tensor:
    """A contiguous tensor from the base64 of its bytes."""
    try:
        content = bytearray(base64.b64decode(text, validate=True))
    except ValueError as error:
        raise ArtifactError(f"a constant's bytes are not base64: {error}. Trace the model again") from error
    expected = prod(shape) * g.BYTES_PER_ELEMENT.get(dtype, 0)
    if len(content) != expected:
        raise ArtifactError(
            f"a constant has {len(content)} bytes; expected {expected}. Trace the model again"
        )
    if not content:
        return torch.empty(shape, dtype=operators.dtype(dtype))
    return torch.frombuffer(content, dtype=operators.dtype(dtype)).reshape(shape)


def replay(ops: list[g.InitialOp], targets: dict[str, str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Makes the tensors of `targets` (name -> tensor on the tape) from their histories.

    Raises:
        ArtifactError: An operator is not allowed, or a name is missing on the tape.
    """
    tape = Tape(ops)
    units = _units(tape, targets)
    with_draws = {draw: unit for unit in units for draw in unit.draws}
    generator = _Generator(seed)
    for unit in units:
        if not unit.draws:
            yield from _produced(tape, unit, generator, {})
    last = max(with_draws, default=-1)
    states: dict[int, torch.Tensor] = {}
    for draw in (index for index in tape.draws if index <= last):
        unit = with_draws.get(draw)
        if unit is not None and len(unit.draws) == 1:
            yield from _produced(tape, unit, generator, {})
            continue
        # a draw that nothing needs, or one of several of a tensor that is made later: only advance
        if unit is not None:
            states[draw] = generator.state
        with generator:
            _run(tape, tape.history_of_draw(draw), keep=())
        if unit is not None and draw == unit.draws[-1]:
            yield from _produced(tape, unit, generator, {index: states.pop(index) for index in unit.draws})


class Replayer:
    """Values on a tape that still grows: what a constructor asks for while it is being recorded."""

    def __init__(self, tape: Tape, seed: int) -> None:
        self._tape = tape
        self._generator = _Generator(seed)
        self._states: dict[int, torch.Tensor] = {}  # before each draw

    def value(self, name: str) -> torch.Tensor:
        """The value that tensor `name` has after all operators so far."""
        self._tape.grow()
        for draw in self._tape.draws[len(self._states) :]:
            self._states[draw] = self._generator.state
            with self._generator:
                _run(self._tape, self._tape.history_of_draw(draw), keep=())
        unit = _Unit(self._tape)
        unit.add({name: name}, self._tape.history(name))
        return dict(_produced(self._tape, unit, self._generator, self._states))[name]


class _Unit:
    """Tensors that are made together, because they share a draw or a storage."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.targets: dict[str, str] = {}
        self.history: dict[int, bool] = {}

    @property
    def draws(self) -> list[int]:
        """The draws whose numbers are needed, in order."""
        return sorted(
            index for index, values in self.history.items() if values and self._tape.ops[index].random
        )

    def add(self, targets: dict[str, str], history: dict[int, bool]) -> None:
        self.targets.update(targets)
        for index, values in history.items():
            self.history[index] = self.history.get(index, False) or values


def _units(tape: Tape, targets: dict[str, str]) -> list[_Unit]:
    """Groups targets that share a draw or a storage."""
    units: list[_Unit] = []
    owner: dict[tuple[str, int], _Unit] = {}
    for name, tensor in targets.items():
        unit = _Unit(tape)
        unit.add({name: tensor}, tape.history(tensor))
        marks = [("storage", tape.storage(tensor)), *(("draw", index) for index in unit.draws)]
        for other in {id(owner[mark]): owner[mark] for mark in marks if mark in owner}.values():
            unit.add(other.targets, other.history)
            units.remove(other)
        units.append(unit)
        for index in unit.draws:
            owner["draw", index] = unit
        for tensor in unit.targets.values():
            owner["storage", tape.storage(tensor)] = unit
    return units


class _Generator:
    """The constructor's random state; inside `with`, it is the process's own."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._callers = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(self, *_: object) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self._callers)


def _produced(
    tape: Tape, unit: _Unit, generator: _Generator, states: dict[int, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Runs a unit's history. With `states`, every draw starts from its recorded state."""
    after = generator.state
    with generator:
        made = _run(tape, unit.history, keep=tuple(unit.targets.values()), states=states)
    if states:
        generator.state = after  # its draws had been passed already
    for name, tensor in unit.targets.items():
        yield name, made[tensor]


@torch.no_grad()
def _run(
    tape: Tape, history: dict[int, bool], keep: tuple[str, ...], states: dict[int, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Runs the operators of `history`, dropping each tensor after its last use."""
    environment: dict[str, torch.Tensor] = {}
    order = sorted(history)
    last_use = {name: index for index in order for name in (*tape.reads(index), *tape.ops[index].results)}
    for index in order:
        op = tape.ops[index]
        if states and history[index] and index in states:
            torch.set_rng_state(states[index])
        # a draw that only gives its shape must leave the generator alone
        shape_only = op.random and not history[index]
        made = _empty(op) if shape_only else _call(op, environment)
        environment.update(zip(op.results, made, strict=True))
        for name in (*tape.reads(index), *op.results):
            if last_use[name] == index and name not in keep:
                environment.pop(name, None)
    return {name: environment[name] for name in keep}


def _empty(op: g.InitialOp) -> list[torch.Tensor]:
    shapes = zip(op.shapes, op.dtypes, strict=True)
    return [torch.empty(shape, dtype=operators.dtype(dtype)) for shape, dtype in shapes]


def _call(op: g.InitialOp, environment: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that one recorded operator gives."""
    if op.op == "literal":
        text = op.args[0]
        if not isinstance(text, str):
            raise ArtifactError(
                "a constant in the record of initial values is not text. Trace the model again"
            )
        return [tensor_from_text(text, op.dtypes[0], op.shapes[0])]
    call = operators.resolve(op.op)
    args = [decode(arg, environment.__getitem__, {}, _CPU) for arg in op.args]
    kwargs = {name: decode(arg, environment.__getitem__, {}, _CPU) for name, arg in op.kwargs.items()}
    result = call(*args, **kwargs)
    return [result] if isinstance(result, torch.Tensor) else list(result)
