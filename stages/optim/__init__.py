"""Optimizer updates of one parameter, or a piece of one, for profiling and training alike."""

from __future__ import annotations

from stages.optim.kernel import CHUNK_MULTIPLE, UpdateKernel
from stages.optim.make import make_kernel

__all__ = ["CHUNK_MULTIPLE", "UpdateKernel", "make_kernel"]
