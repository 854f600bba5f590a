"""The model with every decision as a choice has it."""

from __future__ import annotations

from stages.solve.choice import Choice
from stages.solve.lowering.step import saved_uses
from stages.solve.lowering.windows import windows
from stages.solve.milp.formulation import StepModel
from stages.solve.milp.linear import Session
from stages.solve.pace import whole_pieces
from stages.solve.problem import Problem


def pinned(model: StepModel, choice: Choice) -> Session:
    """`model` where only transfers are left to decide."""
    session = model.program.open()
    for variable, value in point_of(model, choice).items():
        session.fix(variable, value)
    return session


def point_of(model: StepModel, choice: Choice) -> dict[int, float]:
    """The value of each decision under `choice`."""
    variables = model.variables
    point: dict[int, float] = {}
    for index, group in enumerate(model.estimator.weights):
        streams = index not in choice.held and any(choice.weights[region] for region in group.regions)
        point[variables.weights[index]] = float(streams)
        for number in range(1, len(group.slots)):
            if (index, number) in variables.held:
                stays = streams and _merged(model, choice, group.slots, number)
                point[variables.held[index, number]] = float(stays)
    for index, variable in enumerate(variables.state):
        point[variable] = _streamed_share(model.problem, choice, index, model)
    for region, variable in variables.recompute.items():
        point[variable] = float(choice.activations[region] == "recompute")
    for region, variable in variables.move.items():
        point[variable] = float(choice.activations[region] == "move" and _leaves(model, choice, region))
    for name, variable in variables.values.items():
        batches = range(model.problem.micro_batches)
        moves = any(len(model.estimator.value_windows(name, choice, batch)) > 1 for batch in batches)
        point[variable] = float(name in choice.values and moves)
    if variables.gradients is not None:
        point[variables.gradients] = float(choice.gradients == "move")
    return point


def _merged(model: StepModel, choice: Choice, slots: tuple[int, ...], number: int) -> bool:
    """Whether a streamed weight stays between two of its uses."""
    est = model.estimator

    def lead(slot: int) -> int:
        return 0 if choice.moving_bytes else model.problem.lead_slots(choice.prefetch[est.distance_of(slot)])

    stays = windows(slots, lead, choice.hold if choice.moving_bytes else 0)
    return all(stay.first != slots[number] for stay in stays)


def _leaves(model: StepModel, choice: Choice, region: int) -> bool:
    """Whether its activations have time to leave before they come back."""
    slots, est = saved_uses(model.problem, region), model.estimator
    stays = windows(slots, lambda slot: choice.prefetch[est.distance_of(slot)], choice.prefetch[region])
    return len(stays) > 1


def _streamed_share(problem: Problem, choice: Choice, index: int, model: StepModel) -> float:
    if not choice.state[index]:
        return 0.0
    moved = total = 0
    for name in model.estimator.states[index].parameters:
        parameter = problem.parameters[name]
        size = sum(piece.itemsize for piece in whole_pieces(parameter))
        total += parameter.elements * size
        moved += (parameter.elements - choice.kept.get(name, 0)) * size
    return moved / total if total else 1.0
