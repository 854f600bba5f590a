"""A linear program row by row, handed to HiGHS."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import highspy
import numpy as np

#: (variable, coefficient)
Term = tuple[int, float]

_INFINITY = highspy.kHighsInf
_FEASIBLE = highspy.SolutionStatus.kSolutionStatusFeasible
_PRIMAL_SIMPLEX = 4


@dataclass(frozen=True)
class Outcome:
    """What HiGHS found. bound: no feasible point has a smaller objective (within HiGHS's tolerances).

    values: of the best point found, empty where none was.
    """

    bound: float
    objective: float
    values: Sequence[float]


@dataclass
class Expression:
    """constant + sum of coefficient * variable."""

    terms: list[Term] = field(default_factory=list)
    constant: float = 0.0

    def add(self, variable: int, coefficient: float) -> None:
        self.terms.append((variable, coefficient))

    def extend(self, other: Expression, factor: float = 1.0) -> None:
        self.terms.extend((variable, factor * value) for variable, value in other.terms)
        self.constant += factor * other.constant


class LinearProgram:
    """Minimises the sum of costs over variables under rows."""

    def __init__(self) -> None:
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._cost: list[float] = []
        self._integers: list[int] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._coefficients: list[float] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []

    def variable(self, *, upper: float = _INFINITY, cost: float = 0.0, integer: bool = False) -> int:
        """A variable from 0 to `upper`."""
        self._lower.append(0.0)
        self._upper.append(upper)
        self._cost.append(cost)
        if integer:
            self._integers.append(len(self._cost) - 1)
        return len(self._cost) - 1

    def at_least(self, expression: Expression, bound: float = 0.0) -> int:
        """The row `expression >= bound`; returns its index."""
        self._add_row(expression, bound, _INFINITY)
        return len(self._row_lower) - 1

    def equals(self, expression: Expression, value: float = 0.0) -> None:
        """The row `expression = value`."""
        self._add_row(expression, value, value)

    def _add_row(self, expression: Expression, lower: float, upper: float) -> None:
        merged: dict[int, float] = {}
        for variable, coefficient in expression.terms:
            merged[variable] = merged.get(variable, 0.0) + coefficient
        kept = {variable: value for variable, value in merged.items() if value != 0.0}
        self._columns.extend(kept)
        self._coefficients.extend(kept.values())
        self._starts.append(len(self._columns))
        self._row_lower.append(lower - expression.constant)
        self._row_upper.append(upper - expression.constant)

    def open(self) -> Session:
        """HiGHS with this program, its integer variables relaxed."""
        return Session(self._model(), self._integers)

    def _model(self) -> highspy.HighsLp:
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(self._cost), len(self._row_lower)
        model.col_cost_ = np.array(self._cost)
        model.col_lower_, model.col_upper_ = np.array(self._lower), np.array(self._upper)
        model.row_lower_ = np.array(self._row_lower)
        model.row_upper_ = np.array(self._row_upper)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.array(self._starts, dtype=np.int32)
        model.a_matrix_.index_ = np.array(self._columns, dtype=np.int32)
        model.a_matrix_.value_ = np.array(self._coefficients)
        return model


class Session:
    """A program inside HiGHS, solved again and again with small changes, each from where the last ended."""

    def __init__(self, model: highspy.HighsLp, integers: Sequence[int]) -> None:
        self._integers = np.array(integers, dtype=np.int32)
        self._upper = model.col_upper_
        with _no_banner():
            self._highs = highspy.Highs()
        self._highs.setOptionValue("output_flag", False)
        self._highs.setOptionValue("threads", 1)
        # primal simplex is a few times faster here than dual: idle transfers are feasible nearly everywhere
        self._highs.setOptionValue("simplex_strategy", _PRIMAL_SIMPLEX)
        self._highs.passModel(model)

    def fix(self, variable: int, value: float) -> None:
        """Leaves the variable no choice, until `release`."""
        self._highs.changeColBounds(variable, value, value)

    def release(self, variable: int) -> None:
        self._highs.changeColBounds(variable, 0.0, float(self._upper[variable]))

    def shift_row(self, row: int, lower: float) -> None:
        """Asks a row made by `at_least` for `lower`, its constant included, instead of what it had."""
        self._highs.changeRowBounds(row, lower, _INFINITY)

    def relax(self, seconds: float) -> Outcome:
        """Solves with integer variables anywhere between their bounds."""
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(0.1, seconds))
        self._highs.run()
        info, solved = self._highs.getInfo(), self._is_optimal()
        # an unfinished simplex run proves nothing
        return Outcome(info.objective_function_value if solved else 0.0, *self._point())

    def solve(self, seconds: float, gap: float, start: Sequence[float] = ()) -> Outcome:
        """Solves with integers, by branch and bound, then relaxes them again.

        Args:
            start: A feasible point to begin with.
            gap: Relative difference of objective and bound at which the search stops.
        """
        kinds = np.full(len(self._integers), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        self._highs.changeColsIntegrality(len(self._integers), self._integers, kinds)
        if start:
            point = highspy.HighsSolution()
            point.col_value = list(start)
            self._highs.setSolution(point)
        self._highs.setOptionValue("mip_rel_gap", gap)
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + max(0.1, seconds))
        self._highs.run()
        outcome = Outcome(max(0.0, self._highs.getInfo().mip_dual_bound), *self._point())
        kinds[:] = int(highspy.HighsVarType.kContinuous)
        self._highs.changeColsIntegrality(len(self._integers), self._integers, kinds)
        return outcome

    def _is_optimal(self) -> bool:
        return self._highs.getModelStatus() == highspy.HighsModelStatus.kOptimal

    def _point(self) -> tuple[float, list[float]]:
        info = self._highs.getInfo()
        if info.primal_solution_status != _FEASIBLE:
            return _INFINITY, []
        return info.objective_function_value, list(self._highs.getSolution().col_value)


@contextmanager
def _no_banner() -> Iterator[None]:
    """HiGHS prints its version and licence when it is made, before any option can tell it not to."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
