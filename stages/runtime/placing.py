"""Between steps: initial values into their tiers, and weights out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from stages.artifacts import graph as g
from stages.artifacts.plan import Buffer
from stages.optim.groups import Groups
from stages.region import operators
from stages.runtime.state import TrainingState, flat, in_order_of, integers
from stages.runtime.tiers.links import Home
from stages.runtime.transfers import as_bytes

#: elements that are cast at once, so that a weight and its cast are never both whole in memory
_PIECE_ELEMENTS = 1 << 20


class Placing:
    """Fills and reads the homes of weights, masters and optimizer state.

    A buffer's home is its extent if it has one, else its slot in the arena.
    """

    def __init__(
        self,
        graph: g.RegionGraph,
        state: TrainingState,
        kernel: Groups,
        homes: Mapping[str, Home],
        device: torch.device,
    ) -> None:
        self._graph = graph
        self._state = state
        self._kernel = kernel
        self._beyond = homes
        self._device = device
        #: a new scratch file or pool reads as zeros, which is what most optimizer state starts from
        self._is_new = True
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
                own = tensor.detach().clone(memory_format=torch.preserve_format)
                self._state.persistent[name] = own.to(self._device)
            del tensor
        assert not missing, f"no initial value for {sorted(missing)}"
        self.filled()
        self._state.update_counts.clear()

    def filled(self) -> None:
        """Takes note that the tiers beyond the device hold a training state."""
        self._is_new = False

    def _load_parameter(self, parameter: g.Parameter, tensor: torch.Tensor) -> None:
        """Weight, master and optimizer state from the initial value, no two of them whole in memory."""
        whole = flat(tensor, parameter.spec)
        dtype = operators.dtype(parameter.spec.dtype)
        for buffer in self._buffers(parameter.name, "weight"):
            self._put(buffer, whole, lambda piece: piece.to(dtype))
        for buffer in self._buffers(parameter.name, "master"):
            self._put(buffer, whole, lambda piece: piece.float())
        for buffer in self._buffers(parameter.name, "state"):
            self._load_state(parameter, in_order_of(tensor, parameter.spec), whole, buffer)

    def _load_state(
        self, parameter: g.Parameter, shaped: torch.Tensor, whole: torch.Tensor, buffer: Buffer
    ) -> None:
        """The buffer's optimizer state for a parameter, given in its shape and flat."""
        if not self._kernel.base.chunkable:
            state = self._kernel.of(parameter.name).init_state(parameter.name, shaped)[buffer.state]
            self._put(buffer, state.reshape(-1), lambda piece: piece)
            return
        kernel = self._kernel.of(parameter.name)
        self._put(buffer, whole, lambda piece: kernel.init_state(parameter.name, piece)[buffer.state])

    def _buffers(self, name: str, role: str) -> list[Buffer]:
        return self._homes.get((name, role), [])

    def _put(self, buffer: Buffer, whole: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Fills the buffer's home with what `make` gives of its elements, a piece at a time."""
        count = buffer.count or whole.numel()
        for start in range(0, count, _PIECE_ELEMENTS):
            stop = min(start + _PIECE_ELEMENTS, count)
            piece = make(whole[buffer.start + start : buffer.start + stop])
            if buffer.extent is None:
                self._state.slot(buffer)[start:stop].copy_(piece)
                continue
            if self._is_new and buffer.role == "state" and not piece.any():
                continue
            self._beyond[buffer.home].write_from(
                as_bytes(piece), buffer.extent + start * piece.element_size()
            )

    def weights(self, roles: tuple[str, ...]) -> Iterator[tuple[g.Parameter, torch.Tensor]]:
        """Parameters and buffers of `roles`, in the graph's order, one in memory at a time."""
        for parameter in self._graph.parameters:
            if parameter.role in roles:
                yield parameter, self._read(parameter)

    def _read(self, parameter: g.Parameter) -> torch.Tensor:
        if parameter.role != "parameter":
            return self._state.persistent[parameter.name].cpu()
        shape, stride = integers(parameter.spec.shape), integers(parameter.spec.stride)
        tensor = torch.empty_strided(shape, stride, dtype=operators.dtype(parameter.spec.dtype))
        whole = flat(tensor, parameter.spec)
        for buffer in self._buffers(parameter.name, "weight"):
            piece = whole[buffer.start : buffer.start + (buffer.count or whole.numel())]
            if buffer.extent is None:
                piece.copy_(self._state.slot(buffer))
            else:
                self._beyond[buffer.home].read_into(as_bytes(piece), buffer.extent)
        return tensor
