"""The training state between steps as named tensors, streamed out of and into its tiers.

Names and order of elements depend on the model alone, so what one plan gives another one takes.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from stages.artifacts import graph as g
from stages.artifacts.plan import Buffer
from stages.device.interface import Device
from stages.region import operators
from stages.runtime.state import TrainingState, integers, numel
from stages.runtime.tiers.links import Home, SlotHome
from stages.runtime.tiers.memoryviews import as_bytes, is_dense

#: bytes of a piece; those that come from disk pass through one buffer of this size
PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of the training state.

    Elements lie in the storage order of the parameter; buffers and constants of the model in the order
    of their dimensions.

    Attributes:
        name: As in `stages.artifacts.checkpoint.StoredTensor`.
        shape: One dimension where the order of elements is not that of the parameter's dimensions.
        buffers: Its homes in order, none twice; empty for a tensor that never moves.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    parameter: g.Parameter
    buffers: tuple[Buffer, ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.elements * g.BYTES_PER_ELEMENT[self.dtype]


class Homes:
    """Reads and fills the training state of one plan, a piece at a time."""

    def __init__(
        self, graph: g.RegionGraph, state: TrainingState, homes: Mapping[str, Home], device: Device
    ) -> None:
        self._state = state
        self._beyond = homes
        self.device = device
        self.tensors = _tensors(graph, state)

    def read(self, tensor: HeldTensor) -> Iterator[memoryview]:
        """The tensor's bytes in pieces, each valid until the next is asked for."""
        if not tensor.buffers:
            yield as_bytes(self._state.persistent[tensor.parameter.name].detach().cpu().contiguous())
            return
        for piece, home, offset in self._pieces(tensor):
            if home is not None:
                home.read_into(piece, offset)
            yield piece

    def fill(self, tensor: HeldTensor, take: Callable[[memoryview], None]) -> None:
        """Fills the tensor with what `take` puts into the pieces that it gets, in order."""
        if not tensor.buffers:
            self._fill_persistent(tensor, take)
            return
        for piece, home, offset in self._pieces(tensor):
            take(piece)
            if home is not None:
                home.write_from(piece, offset)

    def _fill_persistent(self, tensor: HeldTensor, take: Callable[[memoryview], None]) -> None:
        spec = tensor.parameter.spec
        content = torch.empty(tensor.shape, dtype=operators.dtype(tensor.dtype))
        take(as_bytes(content))
        made = torch.empty_strided(integers(spec.shape), integers(spec.stride), dtype=content.dtype)
        # a buffer that was made by expanding has no such strides once it has values of its own
        whole = made.copy_(content) if is_dense(made) else content
        self._state.persistent[tensor.parameter.name] = whole.to(self.device.target)

    def _pieces(self, tensor: HeldTensor) -> Iterator[tuple[memoryview, Home | None, int]]:
        """Memory of each piece; where that is not its home, the home and the byte offset there."""
        for buffer in tensor.buffers:
            size = g.BYTES_PER_ELEMENT[tensor.dtype] * (buffer.count or tensor.elements)
            if buffer.extent is None and not self.device.beside_host:
                slot = as_bytes(self._state.slot(buffer))
                for start in range(0, size, PIECE_BYTES):
                    yield slot[start : start + PIECE_BYTES], None, 0
                continue
            home, first = self._home(buffer)
            bounce = memoryview(mmap.mmap(-1, max(1, min(size, PIECE_BYTES))))
            for start in range(0, size, PIECE_BYTES):
                yield bounce[: min(PIECE_BYTES, size - start)], home, first + start

    def _home(self, buffer: Buffer) -> tuple[Home, int]:
        if buffer.extent is not None:
            return self._beyond[buffer.home], buffer.extent
        return SlotHome(self._state.slot(buffer).view(torch.uint8)), 0


def _tensors(graph: g.RegionGraph, state: TrainingState) -> list[HeldTensor]:
    homes: dict[tuple[str, str, str], list[Buffer]] = {}
    for buffer in state.buffers.values():
        if buffer.role in ("weight", "master", "state"):
            homes.setdefault((buffer.owner, buffer.role, buffer.state), []).append(buffer)
    found = []
    for parameter in graph.parameters:
        if parameter.role != "parameter":
            shape = integers(parameter.spec.shape)
            found.append(HeldTensor(f"buffer/{parameter.name}", parameter.spec.dtype, shape, parameter))
    parameters = {parameter.name: parameter for parameter in graph.parameters}
    for (owner, role, name), buffers in homes.items():
        found.append(_held(parameters[owner], role, name, buffers))
    return found


def _held(parameter: g.Parameter, role: str, state: str, buffers: list[Buffer]) -> HeldTensor:
    chosen = _covering(buffers)
    count = chosen[-1].start + (chosen[-1].count or numel(parameter.spec))
    prefix = f"{role}/{state}" if state else role
    return HeldTensor(
        name=f"{prefix}/{parameter.name}",
        dtype=chosen[0].dtype,
        shape=_shape(parameter, count),
        parameter=parameter,
        buffers=chosen,
    )


def _covering(buffers: list[Buffer]) -> tuple[Buffer, ...]:
    """The buffers without those whose elements an earlier, longer one holds: pieces share its extent."""
    chosen: list[Buffer] = []
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: (buffer.start, -buffer.count)):
        if buffer.start == end:
            chosen.append(buffer)
            end += buffer.count
    return tuple(chosen)


def _shape(parameter: g.Parameter, count: int) -> tuple[int, ...]:
    shape, stride = integers(parameter.spec.shape), integers(parameter.spec.stride)
    if prod(shape) == count and torch.empty_strided(shape, stride, device="meta").is_contiguous():
        return shape
    return (count,)
