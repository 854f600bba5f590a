"""Tries an optimizer class on two tiny parameters, to find out whether one at a time is the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from stages.artifacts.errors import ConfigError

_STEPS = 3
_SHAPE = (4, 6)  # two dimensions: Muon takes no others

#: attributes that torch's own base class changes in a step
_BOOKKEEPING = ("state", "param_groups", "defaults", "_zero_grad_profile_name")


def construct(
    optimizer: Callable[..., torch.optim.Optimizer],
    parameters: list[torch.nn.Parameter],
    lr: float,
    arguments: dict[str, Any],
) -> torch.optim.Optimizer:
    """An instance. Every class takes `lr`, but for torch's base class, whose type says otherwise."""
    return optimizer(parameters, lr=lr, **arguments)


def check_independent(optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any]) -> None:
    """Refuses a class whose update of one parameter cannot be done alone, from its state alone.

    Raises:
        ConfigError: It couples parameters, needs a closure, takes sparse gradients only, draws random
            numbers, or remembers something outside `state[parameter]`.
    """
    if _needs_closure(optimizer):
        raise _refusal(optimizer, "needs a closure that runs the model again")
    generator = torch.get_rng_state()
    try:
        with refusals(optimizer, f"parameters of shape {list(_SHAPE)}"):
            together, remembered = _train(optimizer, arguments, [0, 1])
            alone = [_train(optimizer, arguments, [index])[0][0] for index in (0, 1)]
        drew = not torch.equal(generator, torch.get_rng_state())
    finally:
        torch.set_rng_state(generator)
    if drew:
        raise _refusal(optimizer, "draws random numbers, whose order would follow the plan")
    if remembered:
        raise _refusal(optimizer, f"keeps {remembered} outside the state of a parameter")
    if not all(torch.equal(one, both) for one, both in zip(alone, together, strict=True)):
        raise _refusal(optimizer, "lets the update of one parameter depend on another")


@contextmanager
def refusals(optimizer: type[torch.optim.Optimizer], what: str) -> Iterator[None]:
    """Turns what a class raises when it does not take something into a refusal that says so."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"{optimizer.__name__} does not take {what}: {error}. Change optimizer.arguments, or use "
            f"another optimizer",
            key="optimizer.name",
            found=str(error),
            expected=f"an optimizer that updates {what}",
        ) from error


def _train(
    optimizer: type[torch.optim.Optimizer], arguments: dict[str, Any], which: list[int]
) -> tuple[list[torch.Tensor], str]:
    """Runs a few steps; gives the parameters, and the name of anything that changed outside state."""
    parameters = [torch.nn.Parameter(_numbers(index)) for index in which]
    instance = construct(optimizer, parameters, 0.1, arguments)
    remembered = ""
    before = _outside_state(instance)
    for step in range(_STEPS):
        for index, parameter in zip(which, parameters, strict=True):
            # of very different sizes, so that a shared norm or step size shows
            parameter.grad = _numbers(index + 7 * step + 3) * 100.0**index
        instance.step()
        after = _outside_state(instance)
        remembered = remembered or _first_difference(before, after)
    return [parameter.detach() for parameter in parameters], remembered


def parameter() -> torch.nn.Parameter:
    """One that every class takes."""
    return torch.nn.Parameter(_numbers(0))


def _numbers(seed: int) -> torch.Tensor:
    """Numbers that look random without drawing any."""
    count = _SHAPE[0] * _SHAPE[1]
    return torch.sin(torch.arange(count, dtype=torch.float32) * 1.7 + seed).reshape(_SHAPE)


def _outside_state(instance: torch.optim.Optimizer) -> dict[str, object]:
    """Everything that a class might remember besides `state[parameter]`, copied."""
    kept: dict[str, object] = {
        name: _copy(value) for name, value in vars(instance).items() if name not in _BOOKKEEPING
    }
    for group in instance.param_groups:
        kept.update({f"group[{key!r}]": _copy(value) for key, value in group.items() if key != "params"})
    shared = [key for key in instance.state if not isinstance(key, torch.Tensor)]
    kept.update({f"state[{key!r}]": None for key in shared})
    return kept


def _copy(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return value


def _first_difference(before: dict[str, object], after: dict[str, object]) -> str:
    for name in {**before, **after}:
        if name not in before or name not in after or not _same(before[name], after[name]):
            return name
    return ""


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or one == other


def _needs_closure(optimizer: type[torch.optim.Optimizer]) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _refusal(optimizer: type[torch.optim.Optimizer], reason: str) -> ConfigError:
    return ConfigError(
        f"{optimizer.__name__} {reason}; expected an optimizer that updates each parameter by itself. "
        f"Use adamw or another elementwise one",
        key="optimizer.name",
        found=optimizer.__name__,
        expected="an optimizer that updates each parameter by itself",
    )
