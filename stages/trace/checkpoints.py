"""The user's activation-checkpoint blocks, as marks on the nodes that were traced inside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.utils.checkpoint
from torch.fx import traceback as fx_traceback

KEY = "stages_checkpoint"


@contextmanager
def marked() -> Iterator[None]:
    """While inside, `torch.utils.checkpoint.checkpoint` runs its function once and marks its nodes.

    `checkpoint` looks its two mechanisms up when called, so references to it that a library took
    earlier are covered too.
    """
    identifiers = itertools.count()
    inside: list[int] = []

    @contextmanager
    def block() -> Iterator[None]:
        inside.append(next(identifiers))
        try:
            with fx_traceback.annotate({KEY: tuple(inside)}):
                yield
        finally:
            inside.pop()

    def without_reentry(*_: Any, **__: Any) -> Iterator[None]:
        with block():
            yield

    class Reentrant:
        """Stands for CheckpointFunction, whose `apply` would hide the block's operators."""

        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            with block():
                return function(*args)

    module = torch.utils.checkpoint
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
