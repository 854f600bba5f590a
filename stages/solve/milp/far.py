"""What host memory does not hold beside an accelerator waits on disk, and moves at the pace of both links."""

from __future__ import annotations

from stages.artifacts.costs import LinkCost
from stages.solve.estimate import Estimator
from stages.solve.milp.demands import Variables
from stages.solve.milp.linear import Expression, LinearProgram
from stages.solve.milp.traffic import Rates, Traffic
from stages.solve.milp.units import BYTES_PER_MB
from stages.solve.pace import whole_pieces


def add_far_links(
    program: LinearProgram, estimator: Estimator, variables: Variables, traffic: Traffic
) -> None:
    """Rows for the whole step: each lane serves one transfer at a time, near or far.

    Whatever streams is read at least once in a step. So at least what is beyond host memory is read from
    disk; and of it, at least the optimizer state beyond host memory and all weights is written back.
    """
    host = estimator.problem.host
    if host is None:
        return
    room = host.room_bytes / BYTES_PER_MB
    weights, state = _streamed_weights(estimator, variables), _streamed_state(estimator, variables)
    beyond = Expression(constant=-room)
    beyond.extend(weights)
    beyond.extend(state)
    all_weights = sum(group.bytes for group in estimator.weights) / BYTES_PER_MB
    beyond_state = Expression(constant=-room - all_weights)
    beyond_state.extend(state)
    problem = estimator.problem
    _add_lane(program, traffic.times, traffic.reads, beyond, problem.read, host.far_read)
    _add_lane(program, traffic.times, traffic.writes, beyond_state, problem.write, host.far_write)


def _streamed_weights(estimator: Estimator, variables: Variables) -> Expression:
    groups = zip(variables.weights, estimator.weights, strict=True)
    return Expression([(variable, group.bytes / BYTES_PER_MB) for variable, group in groups])


def _streamed_state(estimator: Estimator, variables: Variables) -> Expression:
    found = Expression()
    for variable, group in zip(variables.state, estimator.states, strict=True):
        parameters = [estimator.problem.parameters[name] for name in group.parameters]
        size = sum(piece.bytes for parameter in parameters for piece in whole_pieces(parameter))
        found.add(variable, size / BYTES_PER_MB)
    return found


def _add_lane(
    program: LinearProgram,
    times: list[int],
    moved: list[int],
    beyond: Expression,
    near: LinkCost,
    far: LinkCost,
) -> None:
    """The step's time >= all that the lane moves at the near link's best rate, and what a far byte takes
    beyond that for all that is beyond host memory."""
    near_rate, far_rate = Rates.of(near, busy=False).alone, Rates.of(far, busy=False).alone
    excess = program.variable()
    at_least = Expression([(excess, 1.0)])
    at_least.extend(beyond, -1.0)
    program.at_least(at_least)
    row = Expression([(time, 1.0) for time in times])
    row.terms += [(variable, -1.0 / near_rate) for variable in moved]
    row.add(excess, min(0.0, 1.0 / near_rate - 1.0 / far_rate))
    program.at_least(row)
