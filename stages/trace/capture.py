"""Runs `torch.export` on a fake model and reports failures at the user's line."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.export._trace
import torch.export.exported_program
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from stages.artifacts.errors import StageError, TraceError
from stages.trace import checkpoints, dimensions, gradients, libraries
from stages.trace.build import Built
from stages.trace.dimensions import Dimensions, Resolved
from stages.trace.places import error_place, source_line
from stages.trace.structure import Flat, Path, replaced, tensors_in


@dataclass(frozen=True)
class Captured:
    """An exported program whose inputs and outputs are flat tensors."""

    program: ExportedProgram
    resolved: Resolved
    input_names: list[str]
    output_paths: list[Path]
    loss: int | None  # index of the output that is the loss
    output: Any = None  # what forward returned, of fake tensors


Batch = tuple[tuple[Any, ...], dict[str, Any]]


def capture(built: Built, batch: Batch, dims: Dimensions, *, only_loss: bool) -> Captured:
    """Traces the model with the dimensions `dims` dynamic; those that cannot be are fixed.

    Raises:
        TraceError: The model cannot be traced exactly.
    """
    while True:
        # sizes of one are traced as two, which a model may not take
        enlarged = {name for name, size in dims.planned.items() if size < dimensions.LEAST_EXAMPLE}
        try:
            captured = _export(built, batch, dims, only_loss)
        except TraceError:
            if not enlarged:
                raise
            dims = dims.without(enlarged)
            continue
        conflicts = captured.resolved.conflicts & set(dims.planned)
        if not conflicts:
            return captured
        dims = dims.without(conflicts)


def _export(built: Built, batch: Batch, dims: Dimensions, only_loss: bool) -> Captured:
    flat = Flat(built.model, batch, only_loss)
    flat.train(built.model.training)
    tensors = [tensor for _, tensor in tensors_in(batch)]
    with built.mode:
        examples = [
            torch.zeros(dims.example(index, tensor.shape), dtype=tensor.dtype)
            for index, tensor in enumerate(tensors)
        ]
    specification = tuple(
        {position: Dim.AUTO for position, name in enumerate(names) if name is not None}
        for names in dims.names
    )
    with _intercepted(built.model), _reported(built.model):
        program = torch.export.export(
            flat, tuple(examples), dynamic_shapes={"tensors": specification}, strict=False
        )
    resolved = dimensions.resolve(dims, _input_shapes(program), _environment(program))
    names = [_input_name(path) for path, _ in tensors_in(batch)]
    return Captured(program, resolved, names, flat.found.output_paths, flat.found.loss, flat.found.output)


@contextmanager
def _intercepted(model: torch.nn.Module) -> Iterator[None]:
    """Everything that a plain export would lose, decide differently or warn about."""
    # guards as Python code, which nothing here runs: making it fails where the model holds tensors in lists
    no_guards = mock.patch.object(
        torch.export.exported_program, "_convert_guards_to_code", create=True, return_value=[]
    )
    with gradients.refused(model), checkpoints.marked(), libraries.as_in_training(model), _quiet(), no_guards:
        yield


def _input_name(path: Path) -> str:
    """Its name: "input_ids" for the keyword input_ids, "args_0_mask" for mask in the first positional one."""
    parts = path[1:] if path[0] == 1 else ["args", *path[1:]]
    return "_".join(map(str, parts))


def _input_shapes(program: ExportedProgram) -> list[torch.Size]:
    users = set(program.graph_signature.user_inputs)
    return [
        node.meta["val"].shape
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in users
    ]


def _environment(program: ExportedProgram) -> ShapeEnv:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
            return value.fake_mode.shape_env
    raise TraceError("the model's forward contains no tensor operation; expected a computation to train")


@contextmanager
def _quiet() -> Iterator[None]:
    """Export warns of what is handled here: weights listed in attributes, unused outputs.

    Where it fails, it prints the whole graph so far, which would bury the one message of a refusal.
    """
    symbols = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    unprinted = mock.patch.object(torch.export._trace, "print", create=True)
    quiet = mock.patch.object(symbols, "disabled", True)
    with warnings.catch_warnings(), unprinted, quiet:
        warnings.filterwarnings("ignore", message=".*(was|were) assigned during export.*")
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        yield


@contextmanager
def _reported(model: torch.nn.Module) -> Iterator[None]:
    """Turns whatever the model's forward raises into a TraceError with module, file and line."""
    try:
        yield
    except StageError:
        raise
    except Exception as error:  # a boundary: the user's forward may raise anything
        module, place = error_place(error, model)
        cause = _cause(error, source_line(place))
        raise TraceError(
            f"{place or 'the model'}: module {module or type(model).__name__!r} cannot be traced: {cause}",
            found=type(error).__name__,
            expected="a forward of PyTorch operators without branches on tensor values",
        ) from error


def _cause(error: BaseException, line: str) -> str:
    """One line that says what happened; branches on data are named as such.

    Args:
        line: Of the model's source, where it happened.
    """
    name = type(error).__name__
    if name in _DATA_DEPENDENT:
        return (
            f"`{line}` branches on, or takes a size from, the values of a tensor, so that one trace does not "
            f"hold for all batches ({name}). Replace the branch by torch.where or make it independent of the "
            "data"
        )
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{name}: {first}"


_DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException",
    "UserError", "PendingUnbackedSymbolNotFound",
)  # fmt: skip


def example_tensors(batch: Batch) -> Sequence[torch.Tensor]:
    return [tensor for _, tensor in tensors_in(batch)]


def as_examples(batch: Batch, mode: Any) -> Batch:
    """The batch with fake tensors, so that nothing of it stays in memory."""
    with mode:
        fakes = [torch.zeros(tensor.shape, dtype=tensor.dtype) for _, tensor in tensors_in(batch)]
    args, kwargs = replaced(batch, iter(fakes))
    return args, kwargs
