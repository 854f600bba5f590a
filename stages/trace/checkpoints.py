"""The user's activation-checkpoint blocks, as marks on the nodes that were traced inside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.fx import traceback as fx_traceback

KEY = "stages_checkpoint"
#: blocks inside which recomputing draws new random numbers (`preserve_rng_state=False`)
REDRAWN = "stages_checkpoint_redrawn"


@contextmanager
def marked() -> Iterator[None]:
    """While inside, `torch.utils.checkpoint.checkpoint` runs its function once and marks its nodes.

    `checkpoint` looks its two mechanisms up when called, so references to it that a library took
    earlier are covered too.
    """
    identifiers = itertools.count()
    inside: list[int] = []

    @contextmanager
    def block(preserve: bool) -> Iterator[None]:
        inside.append(next(identifiers))
        try:
            with fx_traceback.annotate({KEY: tuple(inside)} | ({} if preserve else {REDRAWN: True})):
                yield
        finally:
            inside.pop()

    def without_reentry(function: Any, preserve: bool = True, *_: Any, **__: Any) -> Iterator[None]:
        with block(preserve):
            yield

    module = torch.utils.checkpoint

    class Reentrant:
        """Stands for CheckpointFunction, whose `apply` would hide the block's operators."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
                # eager gives weights inside no gradient then, and says so
                module.check_backward_validity(args)
                with torch.no_grad():
                    return function(*args)
            with block(preserve):
                return function(*args)

    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.object(module, "_checkpoint_without_reentrant_generator", without_reentry)
        )
        stack.enter_context(mock.patch.object(module, "CheckpointFunction", Reentrant))
        stack.enter_context(fx_traceback.preserve_node_meta())
        yield


def marks(meta: dict[str, Any]) -> list[int]:
    """The checkpoint blocks around a traced node, outermost first."""
    return list((meta.get("custom") or {}).get(KEY, ()))


def redraws(meta: dict[str, Any]) -> bool:
    """Whether recomputing a traced node would draw other random numbers than its forward did."""
    return bool((meta.get("custom") or {}).get(REDRAWN))
