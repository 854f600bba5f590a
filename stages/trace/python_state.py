"""State that a forward keeps in Python, which a trace would freeze at its first value.

A counter in an attribute, a list that grows, a buffer that is assigned anew, numbers from Python's or
NumPy's generators: eager training sees another value in each step, a trace only that of the trace. So
they are refused. An attribute that forward writes before it reads it carries nothing from one step to
the next, and is left alone.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import nn

from stages.artifacts.errors import TraceError
from stages.trace.places import user_place

#: how deep lists and dicts in attributes are looked into
_DEPTH = 4


@contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """While inside, one forward of `model` runs.

    Raises:
        TraceError: It left another state in Python than it found; names module, attribute and, where
            the attribute was assigned, file and line.
    """
    watch = _Watch(model)
    generators = _generators()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Module, "__getattribute__", watch.reading()))
        stack.enter_context(mock.patch.object(nn.Module, "__setattr__", watch.writing()))
        yield
    watch.check()
    for name, before, after in zip(("Python", "NumPy"), generators, _generators(), strict=True):
        if before != after:
            raise TraceError(
                f"the model's forward draws from {name}'s random numbers, which a trace would draw once and "
                f"for all. Expected torch's: use torch.rand and its kin",
                found=f"{name}'s random numbers",
                expected="torch's random numbers",
            )


class _Watch:
    """What forward read of the modules' attributes before writing it, as it was then.

    While it is traced, modules are seen through short-lived stand-ins that share their `__dict__`: so
    that is what tells them apart.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._names = {id(vars(m)): name or type(m).__name__ for name, m in modules.items()}
        self._held = {id(vars(m)): vars(m) for m in modules.values()}
        self._buffers = {key: dict(held["_buffers"]) for key, held in self._held.items()}
        self._first: dict[tuple[int, str], Any] = {}
        self._written: dict[tuple[int, str], str] = {}

    def reading(self) -> Any:
        known, written, first = self._held, self._written, self._first

        def read(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            held = object.__getattribute__(module, "__dict__")
            key = (id(held), name)
            watched = key[0] in known and name in held and name not in _REGISTRIES
            if watched and key not in first and key not in written:
                first[key] = _print_of(value, _DEPTH)
            return value

        return read

    def writing(self) -> Any:
        original, known, written = nn.Module.__setattr__, self._held, self._written

        def write(module: nn.Module, name: str, value: Any) -> None:
            key = (id(vars(module)), name)
            if key[0] in known:
                written[key] = user_place()
            original(module, name, value)

        return write

    def check(self) -> None:
        for (module, name), before in self._first.items():
            if before != _print_of(self._held[module].get(name), _DEPTH):
                raise self._refusal(module, name, "changes its attribute", "keep what changes in a buffer")
        for module, buffers in self._buffers.items():
            for name, buffer in self._held[module]["_buffers"].items():
                if buffer is not buffers.get(name):
                    advice = f"write into it: self.{name}.copy_(...)"
                    raise self._refusal(module, name, "assigns its buffer", advice)

    def _refusal(self, module: int, name: str, what: str, advice: str) -> TraceError:
        place = self._written.get((module, name), "the model")
        return TraceError(
            f"{place}: forward of module {self._names[module]!r} {what} {name!r}; a trace would keep its "
            f"first value. Expected a forward without state in Python; {advice}, which is changed in place",
            found=name,
            expected="state in buffers that are changed in place",
        )


#: PyTorch's own tables; buffers are looked at by themselves
_REGISTRIES = {
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training",
    "_flat_weights", "_flat_weight_refs",
}  # fmt: skip


def _print_of(value: Any, depth: int) -> Any:
    """Something that is equal for an unchanged value: plain data by content, all else by identity."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__, repr(value)
    if depth and isinstance(value, dict):
        return [(repr(key), _print_of(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, (list, tuple)):
        return [_print_of(item, depth - 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    return _Same(value)


class _Same:
    """Equal to another of the very same object, which it keeps alive so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    __hash__ = None  # type: ignore[assignment]


def _generators() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")
    state = () if numpy is None else numpy.random.get_state()
    return random.getstate(), tuple(item.tobytes() if hasattr(item, "tobytes") else item for item in state)
