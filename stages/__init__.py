"""Trains a PyTorch model inside a memory budget, with exactly the numbers of in-memory training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stages.api import Session, offload

__all__ = ["Session", "offload"]


def __getattr__(name: str) -> Any:
    # importing a stage must not import them all, nor torch
    if name in __all__:
        from stages import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
