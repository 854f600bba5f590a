"""Records what builds a model: every operator, in order, while no tensor has memory.

The model is built on fake tensors of the CPU, so that libraries take the branches and make the
random draws of a real construction. The record is replayed later (stages/region/initial.py).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError, TraceError
from stages.region import initial, operators
from stages.region.tape import Tape
from stages.trace import arguments
from stages.trace.places import user_place

#: a constant larger than this belongs in a file, not in the graph
_LITERAL_LIMIT_BYTES = 64 * 2**20

#: how much these draw depends on values, which a skipped draw would not have
_DRAWS_BY_VALUE = ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet")


class History(TorchDispatchMode):
    """The tape of a construction. Enter it inside a `FakeTensorMode`.

    Args:
        seed: What numbers are drawn from where the constructor reads one as a Python value.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.ops: list[g.InitialOp] = []
        self.seed: int | None = None  # set when the record holds for this seed only
        self._seed = seed
        self._tape = Tape(self.ops)
        self._replayer = initial.Replayer(self._tape, seed)
        self._names: dict[int, str] = {}
        self._by_storage: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # keeps ids and storages from being used again
        self.trouble: dict[str, str] = {}  # tensor on the tape -> why it cannot be replayed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.data_dependent_output in func.tags and any(map(_is_fake, args)):
            return self._ask(func, args, kwargs)
        source = self.name(args[1]) if func is torch.ops.aten.set_.source_Tensor else ""
        result = func(*args, **kwargs)
        if source:  # from here on the tensor is a view of the other's storage
            name = self._new(result)
            self._append([name], "aten.detach.default", [g.Ref(source)], {}, False, [result])
            return result
        tensors = [item for item in _leaves(result) if isinstance(item, torch.Tensor)]
        if tensors and (_writes(func) or any(id(tensor) not in self._names for tensor in tensors)):
            self._record(func, args, kwargs, tensors)
        return result

    def name(self, tensor: torch.Tensor) -> str:
        """The tensor's name on the tape.

        Raises:
            TraceError: It was made in a way that was not recorded.
        """
        known = self._names.get(id(tensor))
        if known is not None:
            return known
        if not isinstance(tensor, FakeTensor):
            return self._literal(tensor)
        base = self._by_storage.get(tensor.untyped_storage()._cdata)
        if base is None:
            raise TraceError(
                f"{user_place()}: found a tensor of shape {list(tensor.shape)} whose making was not seen; "
                f"expected initial values to come from PyTorch operators. Make it in the constructor"
            )
        span = [list(tensor.size()), list(tensor.stride()), int(tensor.storage_offset())]
        name = self._new(tensor)
        self._append([name], "aten.as_strided.default", [g.Ref(base), *span], {}, False, [tensor])  # type: ignore[list-item]
        return name

    def _record(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        try:
            encoded = [arguments.encode(arg, self._encode_tensor, "cpu") for arg in args]
            named = {key: arguments.encode(arg, self._encode_tensor, "cpu") for key, arg in kwargs.items()}
            op, trouble = operators.operator_name(func), ""
        except (arguments.UnknownArgumentError, ArtifactError) as error:
            encoded, named, op, trouble = [], {}, "aten.empty.memory_format", f"{func}: {error}"
        if not any(isinstance(item, torch.Tensor) for item in _leaves([args, kwargs])):
            _pin_dtype(func, named, tensors[0])
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random and op.removeprefix("aten.").partition(".")[0] in _DRAWS_BY_VALUE:
            trouble = f"{op} draws by value"
        results = [self._names.get(id(tensor)) or self._new(tensor) for tensor in tensors]
        if trouble:
            encoded, named = [list(tensors[0].shape)], {}
            self.trouble.update(dict.fromkeys(results, f"{user_place()}: {trouble}"))
        self._append(results, op, encoded, named, random, tensors)

    def _append(
        self, results: list[str], op: str, args: list[Any], kwargs: dict[str, Any], random: bool,
        tensors: list[torch.Tensor],
    ) -> None:  # fmt: skip
        dtypes = [operators.DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors]
        shapes = [[int(size) for size in tensor.shape] for tensor in tensors]
        self.ops.append(g.InitialOp(results, op, args, kwargs, random, dtypes, shapes))

    def _new(self, tensor: torch.Tensor) -> str:
        name = f"t{len(self._alive)}"
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        self._by_storage.setdefault(tensor.untyped_storage()._cdata, name)
        return name

    def _literal(self, tensor: torch.Tensor) -> str:
        if tensor.numel() * tensor.element_size() > _LITERAL_LIMIT_BYTES:
            raise TraceError(
                f"{user_place()}: found a constant of {tensor.numel() * tensor.element_size()} bytes made "
                f"outside PyTorch; expected at most {_LITERAL_LIMIT_BYTES}. Make it with PyTorch operators"
            )
        name = self._new(tensor)
        self._append([name], "literal", [literal_text(tensor)], {}, False, [tensor])
        return name

    def _encode_tensor(self, value: Any) -> g.Arg | None:
        return g.Ref(self.name(value)) if isinstance(value, torch.Tensor) else None

    def _ask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The number or truth that the constructor asks for, from the tensors' histories so far."""
        values = []
        for arg in args:
            if _is_fake(arg):
                name = self.name(arg)
                self._tape.grow()
                if any(values and self.ops[i].random for i, values in self._tape.history(name).items()):
                    self.seed = self._seed
                with _disable_current_modes():
                    arg = self._replayer.value(name)
            values.append(arg)
        with _disable_current_modes():
            return func(*values, **kwargs)


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def literal_text(tensor: torch.Tensor) -> str:
    """Base64 of the tensor's bytes in row-major order."""
    with _disable_current_modes(), torch.no_grad():
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        return base64.b64encode(flat.numpy().tobytes()).decode()


@contextmanager
def recording(mode: FakeTensorMode, seed: int) -> Iterator[History]:
    """Builds inside this context are recorded; no tensor gets memory.

    Raises:
        TraceError: The constructor seeds or draws from the generator behind PyTorch's dispatcher.
    """
    history = History(seed)
    before = torch.get_rng_state()
    with mode, history:
        yield history
    if not torch.equal(before, torch.get_rng_state()):
        torch.set_rng_state(before)
        raise TraceError(
            "the model's constructor sets the random seed itself; expected it to draw from the generator "
            "that is seeded before. Remove torch.manual_seed from the constructor"
        )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _pin_dtype(func: Any, named: dict[str, Any], made: torch.Tensor) -> None:
    """Factories without a dtype take the default, which the constructor may have changed."""
    takes = any(argument.name == "dtype" for argument in func._schema.arguments)
    if takes and named.get("dtype") is None and made.dtype in operators.DTYPE_NAMES:
        named["dtype"] = g.Dtype(operators.DTYPE_NAMES[made.dtype])
