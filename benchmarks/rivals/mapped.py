"""Tensors in memory-mapped files: the kernel keeps of them what memory it has, and drops the rest to disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch


class MappedTensors:
    """Makes tensors whose memory is a file each in `folder`. The caller removes it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._numbers = itertools.count()

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A mapped copy."""
        return self.zeros_like(tensor).copy_(tensor)

    def zeros_like(self, tensor: torch.Tensor) -> torch.Tensor:
        # a new file reads as zeros
        path = self._folder / f"{next(self._numbers)}.bin"
        mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
        return mapped.view(tensor.shape)
