"""The history of initial values as a dependence graph: which operators a tensor's value needs."""

from __future__ import annotations

import re
from math import prod

from stages.artifacts import graph as g
from stages.artifacts.errors import ArtifactError
from stages.region import operators
from stages.region.interpreter import references

#: give a tensor of another's shape, whatever its content
_SHAPE_ONLY = re.compile(
    r"aten\.(new_)?(empty|zeros|ones|full|rand|randn|randint)(_like|_strided|_permuted)?\."
)

#: replace the whole content of their first argument, whatever it was
_OVERWRITES = re.compile(
    r"aten\.(normal|uniform|fill|zero|copy|random|exponential|log_normal|cauchy|geometric)_\.|aten\.bernoulli_\.float"
)


class Tape:
    """Operators in the order in which the constructor ran them.

    A tensor's value depends on the operator that made it, on what wrote its storage afterwards, and
    on the values those read. What was written before a complete overwrite does not matter.
    """

    def __init__(self, ops: list[g.InitialOp]) -> None:
        self.ops = ops
        self._maker: dict[str, int] = {}
        self._storage: dict[str, int] = {}
        self._elements: dict[str, int] = {}
        self._base: list[tuple[int, int]] = []  # per storage: the operator that made it, its elements
        self._writers: list[list[int]] = []  # per storage: operators that wrote it later
        self._reads: list[tuple[str, ...]] = []
        self._written: list[list[str]] = []
        #: operators that draw random numbers, in order
        self.draws: list[int] = []
        self.grow()

    def grow(self) -> None:
        """Takes in the operators that were appended to the list since."""
        for index in range(len(self._reads), len(self.ops)):
            self._enter(index)

    def reads(self, index: int) -> tuple[str, ...]:
        """The tensors that an operator takes."""
        return self._reads[index]

    def storage(self, name: str) -> int:
        """A number for the storage that a tensor lies in."""
        self._check(name)
        return self._storage[name]

    def history(self, name: str) -> dict[int, bool]:
        """The operators that the final value of `name` needs, and whether for their numbers.

        False: only a tensor of that shape is needed, because its content is overwritten later.
        """
        self._check(name)
        found: dict[int, bool] = {}
        self._collect(name, len(self.ops), True, found)
        return found

    def history_of_draw(self, index: int) -> dict[int, bool]:
        """The operators needed to run a draw whose numbers do not matter."""
        found = {index: True}
        for name in self._reads[index]:
            # how much is drawn depends on shapes alone (the trace refuses operators where it does not)
            self._collect(name, index, False, found)
        return found

    def _enter(self, index: int) -> None:
        op = self.ops[index]
        self._reads.append(tuple(_tensors(op)))
        if op.random:
            self.draws.append(index)
        for name in self._reads[index]:
            self._check(name)
        mutated, viewed = _aliases(op)
        self._written.append(mutated)
        for name in mutated:
            self._writers[self._storage[name]].append(index)
        for position, name in enumerate(op.results):
            if name in self._maker:
                continue  # an in-place operator gives its argument back
            elements = prod(op.shapes[position]) if position < len(op.shapes) else 0
            self._maker[name] = index
            self._elements[name] = elements
            if viewed is not None:
                self._storage[name] = self._storage[viewed]
            else:
                self._storage[name] = len(self._base)
                self._base.append((index, elements))
                self._writers.append([])

    def _check(self, name: str) -> None:
        if name not in self._maker:
            raise ArtifactError(f"the record of initial values reads {name!r} before it is made. Trace again")

    def _collect(self, name: str, time: int, content: bool, found: dict[int, bool]) -> None:
        """Adds what tensor `name` needs to exist at `time`, and with `content` to have its value."""
        pending = [(name, time, content)]
        seen: set[tuple[str, int, bool]] = set()
        while pending:
            item = pending.pop()
            if item in seen:
                continue
            seen.add(item)
            name, time, content = item
            maker = self._maker[name]
            base, _ = self._base[self._storage[name]]
            values = content and self._add_writers(name, time, found, pending)
            found[base] = found.get(base, False) or values
            found.setdefault(maker, False)
            pending += [(read, maker, False) for read in self._reads[maker]]
            if values and not _SHAPE_ONLY.match(self.ops[base].op):
                pending += [(read, base, True) for read in self._reads[base]]

    def _add_writers(
        self, name: str, time: int, found: dict[int, bool], pending: list[tuple[str, int, bool]]
    ) -> bool:
        """Adds what wrote the storage of `name` before `time`; whether its first content matters."""
        storage = self._storage[name]
        _, elements = self._base[storage]
        for index in reversed(self._writers[storage]):
            if index >= time:
                continue
            found[index] = True
            targets = self._written[index]
            whole = _is_overwrite(self.ops[index]) and self._elements[targets[0]] == elements
            pending += [(read, index, not (whole and read in targets)) for read in self._reads[index]]
            if whole:
                return False
        return True


def _is_overwrite(op: g.InitialOp) -> bool:
    return _OVERWRITES.match(op.op) is not None


def _tensors(op: g.InitialOp) -> list[str]:
    names = [name for arg in op.args for name in references(arg)]
    return names + [name for arg in op.kwargs.values() for name in references(arg)]


def _aliases(op: g.InitialOp) -> tuple[list[str], str | None]:
    """Tensors that `op` writes, and the tensor whose storage its new results lie in (None: their own)."""
    if op.op == "literal":
        return [], None
    schema = operators.overload(op.op)._schema
    written: list[str] = []
    viewed: str | None = None
    for position, argument in enumerate(schema.arguments):
        value = op.args[position] if position < len(op.args) else op.kwargs.get(argument.name)
        if argument.alias_info is None or value is None:
            continue
        if argument.alias_info.is_write:
            written += references(value)
        else:
            viewed = next(references(value), viewed)
    return written, viewed
