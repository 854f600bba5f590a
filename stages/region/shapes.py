"""Shapes of operators whose own rules for tensors without memory are stricter than their kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._meta_registrations as rules

_ROW_BYTES = 16


@contextmanager
def as_computed() -> Iterator[None]:
    """While inside, grouped products of fake tensors have shapes in every dtype and at every size.

    PyTorch knows their shape in bfloat16 and at aligned strides alone, which is what its CUDA kernel
    takes; the CPU's takes all of them.
    """
    with mock.patch.object(rules, "_meta_grouped_mm_common", _grouped_product):
        yield


def _grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **scales: Any,
) -> torch.Tensor:
    """An empty result, whose rows begin at multiples of 16 bytes as the kernels' do.

    Groups are rows of `mat_a` [S, K] for `mat_b` [groups, K, N], columns of both where both are
    matrices, or one matrix each where both are stacks.

    Raises:
        RuntimeError: The shapes do not fit.
    """
    given = [value for value in scales.values() if value not in (None, False)]
    stacked = mat_a.dim() == 3, mat_b.dim() == 3
    torch._check(not given, lambda: "expected a grouped product without scales and bias")
    torch._check((offs is None) == all(stacked), lambda: "expected offsets, or two stacks of matrices")
    if any(stacked):
        torch._check(mat_a.size(-1) == mat_b.size(-2), lambda: "the inner sizes differ")
    groups = [mat_a.size(0)] if all(stacked) else [] if any(stacked) or offs is None else [offs.size(0)]
    dtype = out_dtype or mat_a.dtype
    rows, columns, alignment = mat_a.size(-2), mat_b.size(-1), _ROW_BYTES // dtype.itemsize
    padded = (columns + alignment - 1) // alignment * alignment
    strides = [rows * padded, padded, 1][-2 - len(groups) :]
    return torch.empty_strided([*groups, rows, columns], strides, dtype=dtype, device=mat_a.device)
