"""Between steps: initial values into their tiers, and weights out of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from stages.artifacts import graph as g
from stages.artifacts.plan import Buffer
from stages.optim.kernel import UpdateKernel
from stages.region import operators
from stages.runtime.state import TrainingState, flat, in_order_of, integers, numel
from stages.runtime.tiers.disk import DiskFile
from stages.runtime.transfers import as_bytes


class Placing:
    """Fills and reads the homes of weights, masters and optimizer state.

    A buffer's home is its extent if it has one, else its slot in the arena.
    """

    def __init__(
        self, graph: g.RegionGraph, state: TrainingState, kernel: UpdateKernel, disk: DiskFile | None
    ) -> None:
        self._graph = graph
        self._state = state
        self._kernel = kernel
        self._disk = disk
        self._homes: dict[tuple[str, str], list[Buffer]] = {}
        for buffer in state.buffers.values():
            self._homes.setdefault((buffer.owner, buffer.role), []).append(buffer)

    def load(self, initial: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = set(self._state.parameters)
        for name, tensor in initial:
            missing.remove(name)
            parameter = self._state.parameters[name]
            if parameter.role == "parameter":
                self._load_parameter(parameter, tensor.detach())
            else:
                self._state.persistent[name] = tensor.detach().clone(memory_format=torch.preserve_format)
            del tensor
        assert not missing, f"no initial value for {sorted(missing)}"
        self._state.update_counts.clear()

    def _load_parameter(self, parameter: g.Parameter, tensor: torch.Tensor) -> None:
        weight = tensor.to(operators.dtype(parameter.spec.dtype))
        for buffer in self._buffers(parameter.name, "weight"):
            self._put(buffer, flat(weight, parameter.spec), numel(parameter.spec))
        for buffer in self._buffers(parameter.name, "master"):
            self._put(buffer, flat(tensor.float(), parameter.spec), numel(parameter.spec))
        states = self._buffers(parameter.name, "state")
        if states:
            self._load_states(parameter, tensor, states)

    def _load_states(self, parameter: g.Parameter, tensor: torch.Tensor, buffers: list[Buffer]) -> None:
        initial = self._kernel.init_state(parameter.name, in_order_of(tensor, parameter.spec))
        for buffer in buffers:
            state = initial[buffer.state].reshape(-1)
            self._put(buffer, state, state.numel())

    def _buffers(self, name: str, role: str) -> list[Buffer]:
        return self._homes.get((name, role), [])

    def _put(self, buffer: Buffer, whole: torch.Tensor, elements: int) -> None:
        """Writes the buffer's piece of a flat tensor to its home."""
        piece = whole[buffer.start : buffer.start + (buffer.count or elements)]
        if buffer.extent is None:
            self._state.slot(buffer).copy_(piece)
            return
        assert self._disk is not None, f"buffer {buffer.id} has an extent but there is no disk tier"
        self._disk.write_from(as_bytes(piece), buffer.extent)

    def weights(self, roles: tuple[str, ...]) -> Iterator[tuple[g.Parameter, torch.Tensor]]:
        """Parameters and buffers of `roles`, in the graph's order, one in memory at a time."""
        for parameter in self._graph.parameters:
            if parameter.role in roles:
                yield parameter, self._read(parameter)

    def _read(self, parameter: g.Parameter) -> torch.Tensor:
        if parameter.role != "parameter":
            return self._state.persistent[parameter.name]
        shape, stride = integers(parameter.spec.shape), integers(parameter.spec.stride)
        tensor = torch.empty_strided(shape, stride, dtype=operators.dtype(parameter.spec.dtype))
        whole = flat(tensor, parameter.spec)
        for buffer in self._buffers(parameter.name, "weight"):
            piece = whole[buffer.start : buffer.start + (buffer.count or whole.numel())]
            if buffer.extent is None:
                piece.copy_(self._state.slot(buffer))
            else:
                assert self._disk is not None, f"buffer {buffer.id} has an extent but there is no disk tier"
                self._disk.read_into(as_bytes(piece), buffer.extent)
        return tensor
