"""Norms of gradients, whole parameter by whole parameter."""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot

import torch

#: elements that a check of a gradient takes at once, so that casts and masks stay small
PIECE_ELEMENTS = 1 << 20


def gradient_norm(gradient: torch.Tensor, *, whole: bool = False) -> float:
    """The 2-norm of a flat gradient, in fp32: bitwise `gradient.norm()` where it is fp32 itself.

    16-bit gradients are cast piece by piece: as a whole, the cast would take twice the gradient's
    memory. The pieces are combined in double precision, which differs from `gradient.float().norm()` by
    what fp32 sums lose.

    Args:
        whole: Cast as a whole: bitwise `gradient.float().norm()`.
    """
    if gradient.dtype not in (torch.bfloat16, torch.float16):
        return float(torch.linalg.vector_norm(gradient))
    if whole:
        return float(torch.linalg.vector_norm(gradient.float()))
    norms = [float(torch.linalg.vector_norm(piece.float())) for piece in gradient.split(PIECE_ELEMENTS)]
    return hypot(*norms)


def total_norm(norms: Iterable[float]) -> torch.Tensor:
    """One norm over parameters, as `torch.nn.utils.get_total_norm` combines those of whole gradients.

    Args:
        norms: In the order of the parameters.
    """
    return torch.linalg.vector_norm(torch.tensor(list(norms)))


def clip_factor(norm: torch.Tensor, max_norm: float) -> float:
    """What `torch.nn.utils.clip_grad_norm_` multiplies each gradient of that total norm by; at most 1."""
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
