"""Norms of gradients, whole parameter by whole parameter."""

from __future__ import annotations

from math import hypot

import torch

#: elements that a check of a gradient takes at once, so that casts and masks stay small
PIECE_ELEMENTS = 1 << 20


def gradient_norm(gradient: torch.Tensor) -> float:
    """The 2-norm of a flat gradient, in fp32: bitwise `gradient.norm()` where it is fp32 itself.

    16-bit gradients are cast piece by piece: as a whole, the cast would take twice the gradient's
    memory. The pieces are combined in double precision.
    """
    if gradient.dtype not in (torch.bfloat16, torch.float16):
        return float(torch.linalg.vector_norm(gradient))
    norms = [float(torch.linalg.vector_norm(piece.float())) for piece in gradient.split(PIECE_ELEMENTS)]
    return hypot(*norms)
