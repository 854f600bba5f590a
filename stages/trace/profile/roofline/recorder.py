"""What operators on tensors without memory would do: operations, bytes read and written, bytes alive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten

#: read only the elements that they give, however large their first argument is
_GATHERS = frozenset({_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select, _ATEN.nll_loss_forward})
#: reserve memory and start no kernel
_RESERVES = frozenset(
    {
        _ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.empty_permuted,
        _ATEN.new_empty, _ATEN.new_empty_strided,
    }
)  # fmt: skip
#: attention kernels that skip what a causal mask hides: half of the products (argument `is_causal`)
_SKIPS_HIDDEN = frozenset(
    {
        _ATEN._scaled_dot_product_flash_attention,
        _ATEN._scaled_dot_product_flash_attention_backward,
        _ATEN._scaled_dot_product_efficient_attention,
        _ATEN._scaled_dot_product_efficient_attention_backward,
    }
)


@dataclass(frozen=True)
class Kernel:
    """One operator that does work.

    Attributes:
        flops: Operations of matrix products, convolutions and attention (a multiply-add is two); 0 for
            what memory bandwidth bounds anyway.
        dtype: Of its first floating argument.
        moved_bytes: Arguments read and results written, once each.
    """

    operator: str
    flops: int
    dtype: torch.dtype
    moved_bytes: int


class Recorder(TorchDispatchMode):
    """Records every operator while it is the active mode. Use it inside a FakeTensorMode.

    Args:
        given: Tensors that were there before; their storages count nowhere.
    """

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.peak_bytes = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors that came to be elsewhere: their storages count nowhere either."""
        self._given.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def restart(self) -> None:
        """Forgets the kernels and the peak so far, not what is alive."""
        self.kernels, self.peak_bytes = [], self._live_bytes()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._live_bytes()  # what has gone since the last operator makes room for this one's results
        result = func(*args, **kwargs)
        made = list(_tensors(result))
        if func.namespace == "prim" or (not made and not func._schema.is_mutable):
            return result
        read = list(_tensors((args, kwargs)))
        before = {tensor.untyped_storage()._cdata for tensor in read}
        fresh = [tensor for tensor in made if tensor.untyped_storage()._cdata not in before]
        for tensor in fresh:
            self._enter(tensor)
        self.peak_bytes = max(self.peak_bytes, self._live_bytes())
        packet = func.overloadpacket
        if (fresh or func._schema.is_mutable) and packet not in _RESERVES:
            self.kernels.append(
                Kernel(
                    operator=str(func),
                    flops=_flops(func, args, kwargs, result),
                    dtype=next((t.dtype for t in (*read, *made) if t.is_floating_point()), torch.float32),
                    moved_bytes=_moved_bytes(packet, read, made),
                )
            )
        return result

    def _enter(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._live.get(key)
        # an address may be used again once its storage has gone
        if key not in self._given and (known is None or known[0].expired()):
            self._live[key] = (StorageWeakRef(storage), storage.nbytes())

    def _live_bytes(self) -> int:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            del self._live[key]
        return sum(size for _, size in self._live.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)


def _flops(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> int:
    """By torch's own formulas (torch.utils.flop_counter)."""
    packet = func.overloadpacket
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    flops = int(formula(*args, **kwargs, out_val=result))
    if packet in _SKIPS_HIDDEN:
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        return flops // 2 if given.get("is_causal") else flops
    return flops


def _moved_bytes(packet: Any, read: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    written = sum(_touched_bytes(tensor) for tensor in made)
    if packet in _GATHERS:
        indices = sum(_touched_bytes(tensor) for tensor in read if not tensor.is_floating_point())
        return 2 * written + indices
    return written + sum(_touched_bytes(tensor) for tensor in read)


def _touched_bytes(tensor: torch.Tensor) -> int:
    """Of an expanded tensor only what it has."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
