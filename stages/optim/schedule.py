"""Learning rates over a run: the schedules of torch, two of our own, and how they advance."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import lr_scheduler

from stages.artifacts.errors import ConfigError
from stages.training import SchedulerConfig

#: arguments whose value is a function, or a list of them, by import path
_FUNCTIONS = ("lr_lambda", "scale_fn")


class Schedule:
    """Moves an optimizer's settings once after each update that is made.

    Its state is a function of the losses of those updates, so that a run that goes on replays them.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def advance(self, loss: float) -> None:
        """After an update. loss: of its step, which ReduceLROnPlateau looks at."""
        if self._scheduler is None:
            return
        # torch warns where no update came before
        self._scheduler.optimizer.step()
        if isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def replay(self, losses: Iterable[float]) -> None:
        """Goes to where the updates with those losses have led."""
        for loss in losses:
            self.advance(loss)


def make_schedule(config: SchedulerConfig, optimizer: torch.optim.Optimizer, steps: int) -> Schedule:
    """The configured schedule on `optimizer`.

    Args:
        steps: Of the whole run: where linear and cosine end, and OneCycleLR unless told otherwise.

    Raises:
        ConfigError: No such scheduler, or it does not take its arguments.
    """
    if config.name == "none":
        return Schedule(None)
    if config.name in ("linear", "cosine"):
        return Schedule(lr_scheduler.LambdaLR(optimizer, _factor(config, steps)))
    return Schedule(_by_class(config.name, config.arguments, optimizer, steps, "scheduler"))


def _factor(config: SchedulerConfig, steps: int) -> Callable[[int], float]:
    """Share of the learning rate for the update after `done` others: rises to 1 in the warmup's last, then
    falls to `final` in the run's last."""

    def factor(done: int) -> float:
        if done < config.warmup:
            return (done + 1) / config.warmup
        way = min(1.0, (done - config.warmup) / max(1, steps - 1 - config.warmup))
        left = 1.0 - way if config.name == "linear" else (1.0 + math.cos(math.pi * way)) / 2
        return config.final + (1.0 - config.final) * left

    return factor


def _by_class(
    name: str, arguments: Mapping[str, Any], optimizer: torch.optim.Optimizer, steps: int, key: str
) -> Any:
    scheduler = _find(name, key)
    given = {argument: _plain(argument, value, key) for argument, value in arguments.items()}
    if "schedulers" in given:
        given["schedulers"] = [
            _by_class(item["name"], item.get("arguments", {}), optimizer, steps, f"{key}.arguments")
            for item in given["schedulers"]
        ]
    if scheduler.__name__ == "OneCycleLR" and not {"total_steps", "epochs"} & set(given):
        given["total_steps"] = steps
    try:
        return scheduler(**given, optimizer=optimizer)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{name} does not take {key}.arguments={dict(arguments)}: {error}. Change them",
            key=f"{key}.arguments",
            found=str(dict(arguments)),
            expected=f"arguments of {name}{inspect.signature(scheduler)}",
        ) from error


def _plain(argument: str, value: Any, key: str) -> Any:
    if argument not in _FUNCTIONS:
        return value
    return [_function(item, key) for item in value] if isinstance(value, list) else _function(value, key)


def _function(path: Any, key: str) -> Any:
    module, _, name = str(path).rpartition(".")
    found = getattr(importlib.import_module(module), name, None) if module else None
    if not callable(found):
        raise ConfigError(
            f"{key}.arguments names the function {path}, which is none; expected package.module.function",
            key=f"{key}.arguments",
            found=str(path),
            expected="the import path of a function",
        )
    return found


def _find(name: str, key: str) -> Any:
    classes = {
        known.lower(): member
        for known, member in vars(lr_scheduler).items()
        if inspect.isclass(member) and issubclass(member, lr_scheduler.LRScheduler)
    }
    module, _, short = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), short, None) if module else classes.get(name.lower())
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # something that the module itself imports is missing
        found = None
    if not (inspect.isclass(found) and issubclass(found, lr_scheduler.LRScheduler)):
        near = difflib.get_close_matches(name.lower(), ["none", "linear", "cosine", *classes], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{key}.name={name} is no scheduler; expected none, linear, cosine, or a class of "
            f"torch.optim.lr_scheduler or an import path of one{hint}",
            key=f"{key}.name",
            found=name,
            expected="none, linear, cosine or a subclass of LRScheduler",
        )
    return found
