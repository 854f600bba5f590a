"""The model's parameters, buffers and constants, and where their initial values come from."""

from __future__ import annotations

import json
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError, TraceError
from stages.models import lora
from stages.region import operators, safetensors_reader
from stages.region.tape import Tape
from stages.trace.build import Built
from stages.trace.history import literal_text


def canonical_names(model: nn.Module) -> dict[str, str]:
    """The first name in registration order of each parameter and buffer, by any of its names."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in _registered(model):
        names[name] = first.setdefault(id(tensor), name)
    return names


def _registered(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def describe(
    built: Built, constants: dict[str, torch.Tensor]
) -> tuple[list[g.Parameter], dict[str, torch.Tensor]]:
    """Parameters in registration order, then buffers, then constants; and their (fake) tensors.

    Args:
        constants: Tensors that are neither, by name.

    Raises:
        TraceError: One has a dtype or layout that cannot be planned.
    """
    canonical = canonical_names(built.model)
    groups: dict[str, list[str]] = defaultdict(list)
    for name, first in canonical.items():
        groups[first].append(name)
    tensors = {name: tensor for name, tensor in _registered(built.model) if canonical[name] == name}
    transient = _transient(built.model)
    found = []
    for name, tensor in tensors.items():
        role = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if role == "parameter" and not tensor.numel():
            raise TraceError(
                f"parameter {name!r} has the shape {list(tensor.shape)}, which holds nothing to train; "
                f"expected at least one element. Leave it out, or register it as a buffer",
                found=str(list(tensor.shape)),
            )
        found.append(
            g.Parameter(
                name,
                groups[name],
                _spec(name, tensor),
                role,
                requires_grad=tensor.requires_grad,
                persistent=name not in transient,
                initial_dtype=built.initial_dtypes[name],
            )
        )
    for name, tensor in constants.items():
        found.append(_constant(name, tensor, built))
    return found, {**tensors, **constants}


def _transient(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _spec(name: str, tensor: torch.Tensor) -> g.TensorSpec:
    dtype = operators.DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided:
        raise TraceError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype}; expected a strided one of "
            f"{', '.join(operators.DTYPES)}"
        )
    return g.TensorSpec([int(size) for size in tensor.shape], [int(step) for step in tensor.stride()], dtype)


def _constant(name: str, tensor: torch.Tensor, built: Built) -> g.Parameter:
    real = built.plain.get(id(tensor)) if isinstance(tensor, FakeTensor) else tensor
    if real is None and built.history is None:
        raise TraceError(
            f"forward reads a tensor of shape {list(tensor.shape)} that is neither in the batch, nor in the "
            f"module or its attributes, nor made by an operator that the trace sees. Expected the gradient "
            f"to be taken outside of forward, and tensors from elsewhere to be registered as buffers",
            found=name,
        )
    literal = None if real is None or isinstance(real, FakeTensor) else literal_text(real)
    spec = _spec(name, tensor)
    return g.Parameter(
        name, [name], spec, "constant", persistent=False, literal=literal, initial_dtype=spec.dtype
    )


def initial_values(
    built: Built, parameters: list[g.Parameter], tensors: dict[str, torch.Tensor]
) -> g.Initial:
    """The record from which the runtime makes initial values.

    Raises:
        TraceError: A value cannot be made again.
    """
    if built.history is None:
        return g.Initial(source="live")
    history = built.history
    targets: dict[str, str] = {}
    for parameter in parameters:
        if parameter.literal is None:
            tape_name = built.on_tape.get(parameter.name)
            targets[parameter.name] = tape_name or history.name(tensors[parameter.name])
    files, keys = _saved(built.folder, parameters) if built.folder else ([], {})
    tape = Tape(history.ops)
    replayed = {name: target for name, target in targets.items() if name not in keys}
    for name, target in replayed.items():
        _check_replayable(tape, name, target, history.trouble)
    return g.Initial(
        source="safetensors" if built.folder else "replay",
        ops=_needed(tape, list(replayed.values())),
        targets=replayed,
        folder=str(Path(built.folder).resolve()) if built.folder else "",
        files=files,
        keys=keys,
        seed=history.seed,
    )


def _check_replayable(tape: Tape, name: str, target: str, trouble: dict[str, str]) -> None:
    history = tape.history(target)
    for index in history:
        for result in tape.ops[index].results:
            if result in trouble:
                raise TraceError(
                    f"the initial value of {name} cannot be made again: {trouble[result]}", found=name
                )
    made = [tape.ops[index].op for index, values in history.items() if values]
    if made and all(op.removeprefix("aten.").partition(".")[0] in _UNINITIALISED for op in made):
        raise TraceError(
            f"{name} is never initialised: its constructor leaves it with whatever memory held. Expected an "
            f"initial value; fill it in the constructor",
            found=name,
        )


_UNINITIALISED = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")


def _needed(tape: Tape, targets: list[str]) -> list[g.InitialOp]:
    """The operators that some target or some draw before the last needed one requires."""
    needed: dict[int, bool] = {}
    for target in targets:
        for index, values in tape.history(target).items():
            needed[index] = needed.get(index, False) or values
    last = max((index for index in tape.draws if needed.get(index)), default=-1)
    for draw in tape.draws:
        if draw <= last:
            needed.update(dict.fromkeys(tape.history_of_draw(draw), True))
    return [tape.ops[index] for index in sorted(needed)]


def _saved(folder: str, parameters: list[g.Parameter]) -> tuple[list[str], dict[str, str]]:
    """Weight files of a saved model, and the key of each parameter that they hold."""
    path = Path(folder)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        raise TraceError(
            f"{folder} has no .safetensors file; save the model with safetensors", key="model.path"
        )
    try:
        available = {key for name in files for key in safetensors_reader.read_header(path / name)[0]}
    except ArtifactError as error:
        raise TraceError(str(error), key="model.path") from error
    keys = {p.name: key for p in parameters if (key := _key(p, available)) is not None}
    absent = [p.name for p in parameters if p.name not in keys and p.persistent]
    if len(absent) == sum(1 for p in parameters if p.persistent):
        raise TraceError(f"{folder} holds none of the model's weights ({absent[0]}, ...)", key="model.path")
    absent = [name for name in absent if not name.endswith(lora.WEIGHTS)]
    if absent:
        warnings.warn(
            f"{folder} lacks {', '.join(absent)}: they start from the constructor's values", stacklevel=2
        )
    return files, keys


def _key(parameter: g.Parameter, available: set[str]) -> str | None:
    """A file saved from the bare model lacks the head's prefix, one saved from the head has it."""
    if not parameter.persistent:
        return None
    exact = next((name for name in parameter.names if name in available), None)
    bare = (name.partition(".")[2] for name in parameter.names)
    return exact or next((name for name in bare if name and name in available), None)
