"""Tensors as writable bytes, without a copy."""

from __future__ import annotations

import ctypes

import torch

Bytes = memoryview | torch.Tensor


def as_bytes(buffer: Bytes) -> memoryview:
    """The memory of `buffer` as one-dimensional unsigned bytes.

    The result keeps the tensor alive.

    Args:
        buffer: A tensor on CPU, dense (its elements fill its span of memory, in any order of
            dimensions), or contiguous memory.

    Raises:
        ValueError: The tensor has gaps or overlaps, or is not on CPU.
    """
    if isinstance(buffer, memoryview):
        return buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    if buffer.device.type != "cpu":
        raise ValueError(f"tensor on {buffer.device}; expected one on cpu")
    if not is_dense(buffer):
        raise ValueError(
            f"tensor of shape {tuple(buffer.shape)} and strides {buffer.stride()} has gaps or overlaps; "
            f"expected a dense one. Copy it with .contiguous() first"
        )
    size_bytes = buffer.numel() * buffer.element_size()
    if size_bytes == 0:
        return memoryview(bytearray())
    span = (ctypes.c_ubyte * size_bytes).from_address(buffer.data_ptr())
    # the view holds the span, the span the tensor
    span.owner = buffer  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(span).cast("B")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their span of memory exactly, each once."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if step != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def address_of(view: memoryview) -> int:
    """Where writable memory lies."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(view)) if view.nbytes else 0


def copy(source: memoryview, target: memoryview) -> None:
    """Copies bytes without holding the interpreter's lock, which compute needs between operators."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes into {target.nbytes}")
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)
