"""Forward and backward of one region, such that regions in a row are bitwise the whole model.

Two facts carry this. First, the engine runs nodes in descending order of creation and puts the
gradients it is given into the input buffers before any node runs. So the sum of what later regions
sent to a tensor, passed as one more root, is added to in the very order of a single backward over
the whole model. Second, what autograd saves of a weight or of an input value is packed as a
*handle*, a name and a span, so that the bytes themselves may leave and come back elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from stages.region.interpreter import RegionFunction

#: Finds the present tensor of a weight or input value by name.
Lookup = Callable[[str], torch.Tensor]
#: In which a region's forward packs what autograd saves.
Hooks = AbstractContextManager[object]


@dataclass(frozen=True)
class Span:
    """A strided view of a storage. `conjugate` and `negative`: what complex numbers leave to be done
    to the bytes when they are read (`x.conj()`, `x.conj().imag`)."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Span:
        return Span(tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg())

    @property
    def bytes(self) -> int:
        """From the first element to the last, both included."""
        return _span_elements(self.size, self.stride) * self.dtype.itemsize

    def view(self, storage: torch.UntypedStorage, offset: int) -> torch.Tensor:
        """The tensor again, `offset` elements into `storage`."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch.ops.aten._neg_view.default(tensor) if self.negative else tensor


@dataclass(frozen=True)
class _Handle:
    """A saved view of a named tensor: where it lies relative to that tensor's first element."""

    name: str
    byte_offset: int
    span: Span


class _Holder:
    """A storage that autograd saved, shared by all saved views of it.

    It dies with the last of them, as autograd releases its nodes during backward; `storage` is None
    while the bytes are elsewhere.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage: torch.UntypedStorage | None = storage


@dataclass(frozen=True)
class _Saved:
    """A saved view of a storage that no name stands for."""

    holder: _Holder
    offset: int  # in elements
    span: Span


@dataclass
class Tape:
    """What a region's forward leaves for its backward.

    Output tensors are not in it, only their gradient edges, so that values are freed when their
    readers are done. Leaves give up their data for the same reason.
    """

    outputs: dict[str, GradientEdge] = field(default_factory=dict)
    leaves: dict[str, GradientEdge] = field(default_factory=dict)
    _holders: list[weakref.ref[_Holder]] = field(default_factory=list)

    def storages(self) -> list[torch.UntypedStorage]:
        """The saved storages in the order in which they were first saved."""
        return [holder.storage for holder in self._alive() if holder.storage is not None]

    def release_storages(self) -> None:
        """Lets go of the saved bytes; `restore_storages` brings them back before backward."""
        for holder in self._alive():
            holder.storage = None

    def restore_storages(self, storages: list[torch.UntypedStorage]) -> None:
        for holder, storage in zip(self._alive(), storages, strict=True):
            holder.storage = storage

    def _alive(self) -> Iterator[_Holder]:
        for reference in self._holders:
            holder = reference()
            if holder is not None:
                yield holder


def forward(
    function: RegionFunction,
    tensors: Mapping[str, torch.Tensor],
    sizes: dict[str, int],
    *,
    gradients_of: frozenset[str],
    keep: bool,
    lookup: Lookup,
    hooks: Hooks | None = None,
) -> tuple[dict[str, torch.Tensor], Tape]:
    """Runs a region in grad mode.

    Args:
        tensors: Inputs, weights and buffers by name, none of them requiring a gradient.
        sizes: The value of each size symbol.
        gradients_of: The names among `tensors` that backward wants a gradient of.
        keep: Whether autograd's saved tensors are kept. Otherwise they are dropped as they come: the
            operators run in grad mode all the same, since a forward without it may pick another kernel.
        lookup: Where backward finds a weight or input value by name.
        hooks: In place of those that pack saved tensors; None: what `keep` asks for.

    Returns:
        The outputs, detached, and the tape (empty when not kept).
    """
    tape = Tape()
    leaves = {name: tensors[name].detach().requires_grad_() for name in tensors if name in gradients_of}
    if hooks is None:
        hooks = _keeping(tape, tensors, lookup) if keep else saved_tensors_hooks(_drop, _refuse)
    with torch.enable_grad(), hooks:
        outputs = function({**tensors, **leaves}, sizes)
    if keep:
        tape.outputs = {
            name: get_gradient_edge(output) for name, output in outputs.items() if output.requires_grad
        }
        tape.leaves = {name: get_gradient_edge(leaf) for name, leaf in leaves.items()}
    detached = {name: output.detach() for name, output in outputs.items()}
    for leaf in leaves.values():
        leaf.data = leaf.new_empty(0)
    return detached, tape


def backward(
    tape: Tape,
    output_gradients: Mapping[str, torch.Tensor],
    sums: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor | None]:
    """Gradients of the region's leaves.

    Args:
        tape: From a forward that kept. It is used up.
        output_gradients: Gradient of each output that has one, complete.
        sums: For leaves that later regions already sent gradients to: their sum so far, to which
            this region's contributions are added in the engine's order.

    Returns:
        For each leaf its gradient, `sums` included; None where nothing reaches it.
    """
    roots = [(tape.outputs[name], gradient) for name, gradient in output_gradients.items()]
    roots += [(tape.leaves[name], gradient) for name, gradient in sums.items()]
    names = list(tape.leaves)
    if not roots or not names:
        return dict.fromkeys(names)
    # torch.autograd.grad would compare the gradients' shapes with sympy, whose import takes 35 MB
    gradients = Variable._execution_engine.run_backward(
        tuple(edge for edge, _ in roots),
        tuple(gradient for _, gradient in roots),
        False,  # keep_graph
        False,  # create_graph
        tuple(tape.leaves[name] for name in names),
        True,  # allow_unreachable: None for leaves that nothing reaches
        False,  # accumulate_grad
    )
    return dict(zip(names, gradients, strict=True))


@contextmanager
def _keeping(tape: Tape, tensors: Mapping[str, torch.Tensor], lookup: Lookup) -> Iterator[None]:
    """Packs saved tensors as handles where a named tensor holds the bytes, else in shared holders."""
    named = _NamedSpans(tensors)
    holders: dict[int, _Holder] = {}

    def pack(tensor: torch.Tensor) -> _Handle | _Saved:
        handle = named.handle(tensor)
        if handle is not None:
            return handle
        storage = tensor.untyped_storage()
        holder = holders.get(storage._cdata)
        if holder is None:
            holder = holders[storage._cdata] = _Holder(storage)
            tape._holders.append(weakref.ref(holder))
        return _Saved(holder, int(tensor.storage_offset()), Span.of(tensor))

    def unpack(packed: _Handle | _Saved) -> torch.Tensor:
        if isinstance(packed, _Saved):
            if packed.holder.storage is None:
                raise RuntimeError("saved activations are needed while they are away")
            return packed.span.view(packed.holder.storage, packed.offset)
        base = lookup(packed.name)
        offset = int(base.storage_offset()) + packed.byte_offset // base.element_size()
        return packed.span.view(base.untyped_storage(), offset)

    with saved_tensors_hooks(pack, unpack):
        yield
    # each graph node keeps `pack`, and so this table, alive: left full, it would hold every saved
    # storage until the last node of backward has run
    holders.clear()


class _NamedSpans:
    """Tells which named tensor holds a given tensor's bytes, by address."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._spans = [
            (tensor.data_ptr(), tensor.data_ptr() + span_bytes(tensor), name, tensor.dtype)
            for name, tensor in tensors.items()
            if tensor.numel()
        ]

    def handle(self, tensor: torch.Tensor) -> _Handle | None:
        address = tensor.data_ptr()
        if address == 0:
            return None
        end = address + span_bytes(tensor)
        for start, stop, name, dtype in self._spans:
            if start <= address and end <= stop and dtype == tensor.dtype:
                return _Handle(name, address - start, Span.of(tensor))
        return None


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a strided tensor's first element to its last, both included."""
    return _span_elements(tensor.size(), tensor.stride()) * tensor.element_size()


def _span_elements(sizes: Sequence[int], strides: Sequence[int]) -> int:
    if 0 in sizes:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(packed: None) -> torch.Tensor:
    raise RuntimeError("activations were dropped in this forward; recompute before backward")
