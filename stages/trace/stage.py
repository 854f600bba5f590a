"""The trace stage: a model and the shapes of a batch in, a RegionGraph out.

python -m stages.trace +model=gpt2 data.batch_size=4 data.seq_len=512
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from stages.artifacts import graph as g
from stages.artifacts.errors import TraceError
from stages.config import RunConfig
from stages.region.interpreter import node_references
from stages.trace import build, capture, effects, gradients, nodes, parameters, partition, regions, rehearsal
from stages.trace.blocks import Modules, Tree, units
from stages.trace.build import Built
from stages.trace.capture import Batch, Captured
from stages.trace.dimensions import dimensions_of
from stages.trace.nodes import Converted, Traced
from stages.trace.structure import template_of, tensors_in


def run(config: RunConfig, mode: str = "train") -> g.RegionGraph:
    """The graph of the configured model on int64 tokens [batch, seq] for each of `model.inputs`.

    Raises:
        TraceError: The model cannot be built or traced exactly.
    """
    built = build.build(config.model, config.seed, config.lora)
    with built.mode:
        shapes = {name: config.data.shape_of(name) for name in config.model.inputs}
        batch = ((), {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()})
    return _trace(
        built,
        batch,
        name=config.model.name,
        precision=config.precision,
        mode=mode,
        dynamic=config.trace.dynamic,
        granularity=config.trace.granularity,
        only_loss=True,
    )[0]


def trace_module(module: nn.Module, *given: Any, **settings: Any) -> g.RegionGraph:
    """The graph alone; see `trace_with_outputs`."""
    return trace_with_outputs(module, *given, **settings)[0]


def trace_with_outputs(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    precision: str = "fp32",
    mode: str = "train",
    dynamic: bool = True,
    granularity: str = "block",
    only_loss: bool = False,
) -> tuple[g.RegionGraph, Any]:
    """The graph of a live module on a batch of the planned shapes; initial values are the module's own.

    Also the template of what it returns: an empty tensor stands for each of `RegionGraph.outputs`, unless
    only the loss is returned.

    The module is not changed. Tensors may stand anywhere in nested dicts, lists, tuples and
    dataclasses of `args` and `kwargs`; all other values are fixed. `loss` is "" when forward returns
    no scalar.

    Raises:
        TraceError: The module cannot be traced exactly.
    """
    gradients.check_hooks(module)
    built = build.copied(module)
    batch = capture.as_examples((tuple(args), dict(kwargs or {})), built.mode)
    return _trace(
        built,
        batch,
        name=name or type(module).__name__,
        precision=precision,
        mode=mode,
        dynamic=dynamic,
        granularity=granularity,
        only_loss=only_loss,
    )


def _trace(
    built: Built, batch: Batch, *, name: str, precision: str, mode: str, dynamic: bool,
    granularity: str, only_loss: bool,
) -> tuple[g.RegionGraph, Any]:  # fmt: skip
    build.cast_parameters(built, precision)
    built.model.train(mode == "train")
    captured, converted = _converted(built, batch, dynamic, only_loss)
    if only_loss and captured.loss is None:
        raise TraceError(
            f"{name} returns no scalar to minimise; expected an output called loss, or a scalar tensor",
            key="model.target",
        )
    constants = {key: converted.tensors[key] for key in converted.tensors if key in converted.constants}
    stored, tensors = parameters.describe(built, constants)
    loss = "" if captured.loss is None else converted.outputs[captured.loss]
    live = _with_draws(_without_dead(converted.nodes, set(converted.outputs)), stored, converted.inputs)
    symbols = captured.resolved.symbols
    sizes = {key: symbol.planned for key, symbol in symbols.items()}
    facts = rehearsal.rehearse(live, stored, converted.inputs, sizes, loss)
    _check_writes(live, stored, {key for key, _ in converted.inputs}, facts)
    _check_autocast(live, stored)
    if mode == "train" and loss and not facts.receives:
        raise TraceError(f"{name}: the loss depends on no parameter that requires a gradient")
    found_regions, values = _partitioned(built, live, stored, converted, facts, sizes, granularity)
    graph = g.RegionGraph(
        model=name,
        mode=mode,
        precision=precision,
        symbols=symbols,
        inputs=_inputs(converted, batch),
        outputs=_outputs(converted, captured, stored),
        loss=loss,
        nodes=[traced.node for traced in live],
        regions=found_regions,
        values=values,
        parameters=stored,
        initial=parameters.initial_values(built, stored, tensors),
        export_config=built.export_config,
    )
    return graph, None if only_loss else template_of(captured.output)


def _converted(built: Built, batch: Batch, dynamic: bool, only_loss: bool) -> tuple[Captured, Converted]:
    """Traces; dimensions whose sizes cannot be expressed become static and the model is traced again."""
    dims = dimensions_of([tensor for _, tensor in tensors_in(batch)], dynamic)
    names = parameters.canonical_names(built.model)
    while True:
        captured = capture.capture(built, batch, dims, only_loss=only_loss)
        try:
            return captured, nodes.convert(captured, dict(names))
        except nodes.UnsupportedSizesError as error:
            dims = dims.without(error.names | (set(dims.planned) - set(captured.resolved.symbols)))


def _without_dead(traced: list[Traced], returned: set[str]) -> list[Traced]:
    """Drops nodes that nothing needs. What draws random numbers or changes a tensor stays."""
    needed = set(returned)
    kept = []
    for item in reversed(traced):
        if item.node.name in needed or item.node.random or item.writes:
            needed.update(node_references(item.node))
            kept.append(item)
    return kept[::-1]


def _with_draws(
    live: list[Traced], stored: list[g.Parameter], inputs: list[tuple[str, g.TensorSpec]]
) -> list[Traced]:
    """Notes at each random node what its arguments look like, so that it can be run by itself."""
    specs = {parameter.name: parameter.spec for parameter in stored} | dict(inputs)
    specs |= {traced.node.name: traced.specs[0] for traced in live if len(traced.specs) == 1}
    found = []
    for traced in live:
        if traced.node.random:
            drawn = [specs[name] for name in dict.fromkeys(node_references(traced.node))]
            traced = dataclasses.replace(traced, node=msgspec.structs.replace(traced.node, drawn=drawn))
        found.append(traced)
    return found


def _check_writes(
    live: list[Traced], stored: list[g.Parameter], inputs: set[str], facts: rehearsal.Facts
) -> None:
    """Refuses changes in place of trained weights and of the batch."""
    trained = {facts.storage[p.name]: f"parameter {p.name!r}" for p in stored if p.requires_grad}
    given = {facts.storage[name]: f"the batch's {name!r}" for name in inputs}
    for traced in live:
        for name in traced.writes:
            target = (trained | given).get(facts.storage[name])
            if target is not None:
                raise TraceError(
                    f"{traced.node.location}: module {traced.node.module!r} changes {target} in place "
                    f"({traced.node.op}); expected forward to leave it alone. Work on a clone",
                    found=traced.node.op,
                )


def _check_autocast(live: list[Traced], stored: list[g.Parameter]) -> None:
    """Refuses a trained weight that autocast casts twice.

    Eager casts it once and sums its gradients in the lower precision; regions, each with a cast of
    its own, would sum them in the higher one.
    """
    trained = {p.name: p.spec.dtype for p in stored if p.requires_grad}
    cast: set[str] = set()
    for traced in live:
        node = traced.node
        for name in effects.cast_by_autocast(node):
            if node.autocast is None or trained.get(name) in (None, node.autocast.dtype):
                continue
            if name in cast:
                raise TraceError(
                    f"{node.location}: module {node.module!r} uses {name} a second time under autocast, "
                    f"which keeps its cast and sums gradients in {node.autocast.dtype}. Expected one use; "
                    f"leave autocast out and give precision=bf16, or cast the weight yourself",
                    found=name,
                    expected="a weight used once under autocast",
                )
            cast.add(name)


def _partitioned(
    built: Built, live: list[Traced], stored: list[g.Parameter], converted: Converted, facts: rehearsal.Facts,
    sizes: dict[str, int], granularity: str,
) -> tuple[list[g.Region], list[g.Value]]:  # fmt: skip
    weights = {p.name: g.storage_bytes(p.spec, sizes) for p in stored if p.role == "parameter"}
    tree = Tree(_modules(built.model), weights)
    program = partition.Program(live, facts, tree, frozenset(p.name for p in stored))
    starts = partition.cut(program, granularity)
    return regions.build(
        live,
        starts,
        units(live, tree, granularity),
        {p.name: p for p in stored},
        dict(converted.inputs),
        converted.outputs,
        facts,
    )


def _modules(model: nn.Module) -> Modules:
    classes = {path: f"{type(m).__module__}.{type(m).__qualname__}" for path, m in model.named_modules()}
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    ordered = frozenset(path for path, module in model.named_modules() if isinstance(module, containers))
    return Modules(classes, ordered)


def _inputs(converted: Converted, batch: Batch) -> list[g.InputSpec]:
    paths = [["args" if path[0] == 0 else "kwargs", *path[1:]] for path, _ in tensors_in(batch)]
    return [g.InputSpec(name, path, spec) for (name, spec), path in zip(converted.inputs, paths, strict=True)]


def _outputs(converted: Converted, captured: Captured, stored: list[g.Parameter]) -> list[g.OutputSpec]:
    held = {p.name for p in stored}
    result = []
    for name, path in zip(converted.outputs, captured.output_paths, strict=True):
        if name in held:
            raise TraceError(
                f"the model returns {name} itself as output {path}; expected values made in forward"
            )
        result.append(g.OutputSpec(name, path))
    return result
