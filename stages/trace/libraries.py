"""Makes a library take the branches while it is traced that it takes in ordinary training.

transformers asks whether it is being exported, and then builds attention masks that eager training
skips: other kernels would run, other numbers come out in 16 bits, and grouped queries would be
copied. Mixtures of experts would be given an operator of transformers' own in place of PyTorch's grouped
product. What holds for every batch of these shapes is answered here as eager would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.fx.node import Node, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from stages.region import shapes


@contextmanager
def as_in_training(model: nn.Module) -> Iterator[None]:
    """While inside, transformers decides about attention masks and experts as it does outside of tracing.

    What `model` would install in its first forward (hooks that collect outputs, which do nothing
    until they are asked to) is installed before.

    Masks and position ids that come in with the batch are still handled as in a trace, since their
    values may differ from batch to batch.
    """
    _install_collectors(model)
    masking = sys.modules.get("transformers.masking_utils")
    with ExitStack() as stack:
        if masking is not None and hasattr(masking, "is_torchdynamo_exporting"):
            stack.enter_context(mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False))
        if masking is not None and hasattr(masking, "find_packed_sequence_indices"):
            found = _find_packed(masking.find_packed_sequence_indices)
            stack.enter_context(mock.patch.object(masking, "find_packed_sequence_indices", found))
        experts = sys.modules.get("transformers.integrations.moe")
        if experts is not None and hasattr(experts, "is_torchdynamo_compiling"):
            stack.enter_context(mock.patch.object(experts, "is_torchdynamo_compiling", return_value=False))
        stack.enter_context(shapes.as_computed())
        for module in _with_plain_masks(model):
            stack.enter_context(mock.patch.object(module, "is_torchdynamo_compiling", return_value=False))
        yield


def _install_collectors(model: nn.Module) -> None:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    modeling = sys.modules.get("transformers.modeling_utils")
    if capturing is None or modeling is None or not hasattr(capturing, "maybe_install_capturing_hooks"):
        return
    for module in model.modules():
        if isinstance(module, modeling.PreTrainedModel) and capturing._CAN_RECORD_REGISTRY.get(module):
            capturing.maybe_install_capturing_hooks(module)


def _with_plain_masks(model: nn.Module) -> set[Any]:
    """Source files of models that make a mask of ones in training and calculate with it themselves."""
    found = set()
    for module in model.modules():
        source = sys.modules.get(type(module).__module__)
        settings: Any = getattr(module, "config", None)
        attention = getattr(settings, "_attn_implementation", None)
        if attention == "eager" and hasattr(source, "is_torchdynamo_compiling"):
            found.add(source)
    return found


def _find_packed(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """Eager training looks whether position ids restart (several sequences packed in one row)."""

    def find(position_ids: torch.Tensor) -> Any:
        known = value_from_shapes(position_ids)
        if known is not None:
            with _disable_current_modes():
                if bool((known[:, 1:] - known[:, :-1] == 1).all()):
                    return None
        return original(position_ids)

    return find


def value_from_shapes(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of a traced tensor at the example sizes, if it follows from shapes alone; else None."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot = get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return None
    try:
        with _disable_current_modes(), torch.no_grad():
            value = _evaluate(slot.proxy.node, {})
    except _DependsOnDataError:
        return None
    return value if isinstance(value, torch.Tensor) else None


class _DependsOnDataError(Exception):
    """A value that the batch or a weight goes into."""


def _evaluate(node: Node, known: dict[Node, Any]) -> Any:
    if node in known:
        return known[node]
    size = node.meta.get("val")
    if isinstance(size, torch.SymInt):
        value: Any = int(size.node.hint)
    elif (
        node.op != "call_function"
        or not isinstance(node.target, torch._ops.OpOverload)
        or torch.Tag.nondeterministic_seeded in node.target.tags
        or node.target._schema.is_mutable
    ):
        raise _DependsOnDataError
    else:
        args = map_arg(node.args, lambda inner: _evaluate(inner, known))
        kwargs = map_arg(node.kwargs, lambda inner: _evaluate(inner, known))
        value = node.target(*args, **kwargs)
    known[node] = value
    return value
