"""From a point of the model to a choice that lowering can carry out."""

from __future__ import annotations

from collections.abc import Sequence

from stages.artifacts.plan import ALIGNMENT
from stages.solve.choice import Choice, everything_resident
from stages.solve.milp.formulation import StepModel
from stages.solve.pace import whole_pieces

#: shares nearer to 0 or 1 than this are taken as such
_NEARLY = 1e-4


def choice_at(model: StepModel, values: Sequence[float]) -> Choice:
    """The choice nearest to a point: shares of state to whole chunks, all else to yes or no.

    Args:
        values: Of all variables of `model.program`.
    """
    choice = everything_resident(model.problem)
    _round_weights(model, values, choice)
    _round_state(model, values, choice)
    _round_activations(model, values, choice)
    variables = model.variables
    choice.values = frozenset(name for name, moves in variables.values.items() if values[moves] > 0.5)
    if variables.gradients is not None:
        choice.gradients = "move" if values[variables.gradients] > 0.5 else "keep"
    choice.hold = _hold(model, values)
    return choice


def _round_weights(model: StepModel, values: Sequence[float], choice: Choice) -> None:
    groups = model.estimator.weights
    streamed = [values[variable] > 0.5 for variable in model.variables.weights]
    for group, streams in zip(groups, streamed, strict=True):
        for region in group.regions if streams else ():
            choice.weights[region] = True
    choice.held = frozenset(index for index, streams in enumerate(streamed) if not streams)


def _round_state(model: StepModel, values: Sequence[float], choice: Choice) -> None:
    problem = model.problem
    for index, (group, variable) in enumerate(
        zip(model.estimator.states, model.variables.state, strict=True)
    ):
        share = values[variable]
        divisible = problem.optimizer.chunkable and not group.small
        choice.state[index] = share > (_NEARLY if divisible else 0.5)
        if not choice.state[index] or not divisible:
            continue
        parameters = [problem.parameters[name] for name in group.parameters]
        sizes = {item.name: sum(piece.itemsize for piece in whole_pieces(item)) for item in parameters}
        stays = (1.0 - share) * sum(item.elements * sizes[item.name] for item in parameters)
        for parameter in parameters:
            wanted = min(parameter.elements, int(stays / max(1, sizes[parameter.name])))
            kept = wanted if wanted == parameter.elements else wanted // ALIGNMENT * ALIGNMENT
            if kept:
                choice.kept[parameter.name] = kept
                stays -= kept * sizes[parameter.name]


def _round_activations(model: StepModel, values: Sequence[float], choice: Choice) -> None:
    variables = model.variables
    for region, recompute in variables.recompute.items():
        again, moved = values[recompute], values[variables.move[region]]
        if again + moved > 0.5:
            choice.activations[region] = "recompute" if again >= moved else "move"


def _hold(model: StepModel, values: Sequence[float]) -> int:
    """The longest gap for which about as many bytes stay as the point holds."""
    groups, variables = model.estimator.weights, model.variables
    gaps: list[tuple[int, int]] = []
    budget = 0.0
    for (index, number), held in variables.held.items():
        if values[variables.weights[index]] > 0.5:
            slots = groups[index].slots
            gaps.append((slots[number] - slots[number - 1], groups[index].bytes))
            budget += values[held] * groups[index].bytes
    hold = 0
    for gap, size in sorted(gaps):
        budget -= size
        if budget < -0.5 * size:
            break
        hold = gap
    # `windows` merges uses that lie up to hold + 1 slots apart
    return max(0, hold - 1)


def rounded_along(model: StepModel, values: Sequence[float], offset: float = 0.0) -> dict[int, float]:
    """Each discrete variable at 0 or 1, so that along the chain of regions the bytes chosen so far stay
    near those of the point (error diffusion): rounding each by itself would take equal regions, which
    share a choice in the relaxation, all to the same side.

    Args:
        offset: What is owed before the first region, as a share of its bytes; -0.5 to 0.5.
    """
    fixed: dict[int, float] = {}
    for variables in _series(model):
        error = offset * variables[0][1] if variables else 0.0
        for variable, size in variables:
            wanted = values[variable] * size + error
            fixed[variable] = float(wanted >= 0.5 * size)
            error = wanted - fixed[variable] * size
    for region, move in model.variables.move.items():
        if fixed[move] and fixed[model.variables.recompute[region]]:
            fixed[move] = 0.0
    return fixed


def _series(model: StepModel) -> list[list[tuple[int, float]]]:
    """Discrete variables whose choices stand in for one another, in order of regions, with sizes."""
    variables, regions = model.variables, model.problem.regions
    weights = zip(variables.weights, model.estimator.weights, strict=True)
    found = [[(variable, float(group.bytes)) for variable, group in weights]]
    for table in (variables.recompute, variables.move):
        found.append(
            [(variable, float(regions[region].cost.saved_bytes)) for region, variable in table.items()]
        )
    found.append(
        [(moves, float(model.problem.values[name].bytes)) for name, moves in variables.values.items()]
    )
    if variables.gradients is not None:
        found.append([(variables.gradients, 1.0)])
    return found
