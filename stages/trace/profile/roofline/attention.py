"""Attention as an NVIDIA GPU would run it, on tensors without memory.

The processor's choice of kernel says nothing of the GPU's. Assumed here, as in torch's own choice for
CUDA (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp): the flash kernel for 16-bit numbers, no
mask and a head size of at most 256, where the GPU has it; else the memory-efficient kernel, unless
queries share keys (`enable_gqa`), which it does not take; else the plain products. Only the last
one holds a matrix of queries by keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

OPERATOR = "aten.scaled_dot_product_attention.default"

_ATEN = torch.ops.aten
_LARGEST_FLASH_HEAD = 256
_HALF_PRECISION = (torch.float16, torch.bfloat16)
#: the efficient kernel reads its mask in rows of a multiple of this many elements
_MASK_ALIGNMENT = 8

Attention = Callable[..., torch.Tensor]


def gpu_attention(*, flash: bool) -> Attention:
    """A stand-in for `aten.scaled_dot_product_attention`.

    Args:
        flash: Whether the GPU has a flash kernel.
    """

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        four_dimensional = query.dim() == key.dim() == value.dim() == 4
        shares = enable_gqa and query.size(1) != key.size(1)
        head = max(query.size(-1), value.size(-1))
        fits = query.dtype in _HALF_PRECISION and head <= _LARGEST_FLASH_HEAD and query.size(-1) == head
        if flash and four_dimensional and attn_mask is None and fits:
            kernel = _ATEN._scaled_dot_product_flash_attention.default
            return kernel(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        if four_dimensional and not shares:
            kernel = _ATEN._scaled_dot_product_efficient_attention.default
            bias = _bias(query, key, attn_mask)
            return kernel(query, key, value, bias, True, dropout_p, is_causal, scale=scale)[0]
        kernel = _ATEN._scaled_dot_product_attention_math.default
        return kernel(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    return attention


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask as the efficient kernel takes it: additive, one row per query, rows padded."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
    width = key.size(-2)
    padding = -width % _MASK_ALIGNMENT
    if padding:
        mask = torch.nn.functional.pad(mask, (0, padding))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(-2), width)
