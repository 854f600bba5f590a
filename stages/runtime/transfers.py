"""The read and write lanes' instructions: bytes between the device tier and the tiers beyond it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from stages.artifacts.plan import ALIGNMENT, Buffer, Instruction
from stages.device.interface import Device
from stages.region.autograd import span_bytes
from stages.runtime.compute import Compute
from stages.runtime.state import Layout, TrainingState, in_order_of
from stages.runtime.tiers.links import Link


class Transfers:
    """Moves buffers between memory and their extents.

    Args:
        state: Slots of planned buffers.
        links: By home; the scratch file itself where the device tier is host memory.
    """

    def __init__(self, state: TrainingState, links: Mapping[str, Link], device: Device) -> None:
        self._state = state
        self._links = links
        self._device = device

    def perform(self, instruction: Instruction, compute: Compute) -> tuple[int, str]:
        """Runs one transfer of the step that `compute` is in.

        Returns:
            Bytes moved, and the home that they came from or went to.
        """
        accesses = instruction.writes if instruction.operation == "read" else instruction.reads
        buffer = self._state.buffers[accesses[0].buffer]
        assert buffer.extent is not None, f"buffer {buffer.id} has no home beyond the device"
        if instruction.operation == "read":
            return self._read(buffer, buffer.extent, compute), buffer.home
        return self._write(buffer, buffer.extent, compute), buffer.home

    def _read(self, buffer: Buffer, extent: int, compute: Compute) -> int:
        step = compute.step
        if buffer.offset is not None:
            slot = self._state.slot(buffer)
            return self._links[buffer.home].read_into(as_bytes(slot), extent)
        if buffer.role == "saved":
            return self._read_saved(buffer, extent, compute)
        # it stays: a value may be read back for a late reader, and again for its backward
        layout = step.away.get(buffer.id)
        if layout is None:
            return 0  # nothing was written: no gradient reached this parameter or value
        tensor = layout.new_tensor(self._device)
        moved = self._links[buffer.home].read_into(as_bytes(tensor), extent)
        _table(buffer, compute)[buffer.owner] = tensor
        return moved

    def _write(self, buffer: Buffer, extent: int, compute: Compute) -> int:
        if buffer.offset is not None:
            return self._links[buffer.home].write_from(as_bytes(self._state.slot(buffer)), extent)
        if buffer.role == "saved":
            return self._write_saved(buffer, extent, compute)
        tensor = _table(buffer, compute).get(buffer.owner)
        if tensor is None:
            return 0
        if buffer.role == "gradient":
            # the update may read it back in pieces, which are cut in the weight's storage order
            tensor = in_order_of(tensor, self._state.parameters[buffer.owner].spec)
        compute.step.away[buffer.id] = Layout.of(tensor)
        return self._links[buffer.home].write_from(as_bytes(tensor), extent)

    def _write_saved(self, buffer: Buffer, extent: int, compute: Compute) -> int:
        region, micro = compute.region_index(buffer.owner), compute.step.micro[buffer.micro_batch]
        if region not in micro.tapes:
            return 0  # an empty micro-batch
        storages = micro.tapes[region].storages()
        micro.saved_away[region] = [storage.nbytes() for storage in storages]
        moved = 0
        for storage, offset in zip(storages, _offsets(storages, extent), strict=True):
            moved += self._links[buffer.home].write_from(_storage_bytes(storage), offset)
        return moved

    def _read_saved(self, buffer: Buffer, extent: int, compute: Compute) -> int:
        region, micro = compute.region_index(buffer.owner), compute.step.micro[buffer.micro_batch]
        storages = [self._device.new_storage(size) for size in micro.saved_away.pop(region, [])]
        moved = 0
        for storage, offset in zip(storages, _offsets(storages, extent), strict=True):
            moved += self._links[buffer.home].read_into(_storage_bytes(storage), offset)
        if storages:
            micro.tapes[region].restore_storages(storages)
        return moved


def release(buffer: Buffer, compute: Compute) -> list[torch.UntypedStorage]:
    """Ends a dynamic buffer's life in memory; what was written to its extent stays there.

    Returns:
        Its memory, for whoever must hold it a little longer.
    """
    if buffer.role == "saved":
        tape = compute.step.micro[buffer.micro_batch].tapes.get(compute.region_index(buffer.owner))
        if tape is None:
            return []
        storages = tape.storages()
        tape.release_storages()
        return storages
    if buffer.role in ("value", "value_gradient", "gradient"):
        tensor = _table(buffer, compute).pop(buffer.owner, None)
        return [] if tensor is None else [tensor.untyped_storage()]
    return []


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in storage order, as uint8 without a copy."""
    count = span_bytes(tensor)
    start = tensor.storage_offset() * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), start, (count,), (1,))


def _storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _offsets(storages: list[torch.UntypedStorage], extent: int) -> list[int]:
    offsets = []
    for storage in storages:
        offsets.append(extent)
        extent += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
    return offsets


def _table(buffer: Buffer, compute: Compute) -> dict[str, torch.Tensor]:
    micro = compute.step.micro[buffer.micro_batch]
    if buffer.role == "gradient":
        # the first micro-batch's is the sum over all
        return micro.gradients if buffer.micro_batch else compute.step.gradients
    return micro.values if buffer.role == "value" else micro.value_gradients
