"""From the optimizer's configuration to its kernel."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from stages.artifacts.errors import ConfigError
from stages.optim import fused
from stages.optim.kernel import UpdateKernel

if TYPE_CHECKING:  # the schema needs OmegaConf at run time, the kernels do not
    from stages.config import OptimizerConfig

PRECISIONS = ("fp32", "bf16", "fp16")

#: settings with a field of their own in the configuration
_NAMED = ("betas", "eps", "weight_decay", "momentum")


def make_kernel(name: str, settings: OptimizerConfig, precision: str) -> UpdateKernel:
    """The kernel of an optimizer.

    "adamw", "adam", "sgd" and "adagrad" are torch's fused operators (and so is the class's path with
    `fused: true` in the arguments). With `fused: false`, and for every other name ("rmsprop",
    "torch.optim.Adafactor", "package.Class"), the class itself does the update.

    For a class, `lr` and `weight_decay` are passed, everything in `arguments`, and of betas, eps
    and momentum those that differ from the schema's defaults: else the class's own defaults hold.

    Args:
        name: Short name or import path.
        precision: "fp32" | "bf16" | "fp16".

    Raises:
        ConfigError: The optimizer is unknown, does not take a setting, couples parameters, needs a
            closure, or takes sparse gradients only.
    """
    if precision not in PRECISIONS:
        raise ConfigError(
            f"precision {precision!r}; expected one of {', '.join(PRECISIONS)}",
            key="precision",
            found=precision,
            expected=", ".join(PRECISIONS),
        )
    arguments = dict(settings.arguments)
    short = _SHORT_NAMES.get(name, name)
    wants_fused = arguments.get("fused", name not in _SHORT_NAMES)
    if short in _FUSED and wants_fused:
        arguments.pop("fused", None)
        return _make_fused(short, settings, arguments)
    from stages.optim.by_class import ClassKernel  # loads dynamo, which the fused ones do without

    optimizer = find_class(name)
    return ClassKernel(optimizer, _class_arguments(optimizer, settings, arguments))


def _make_fused(name: str, settings: OptimizerConfig, arguments: dict[str, Any]) -> UpdateKernel:
    if arguments.get("foreach"):
        raise ConfigError(
            f"optimizer.arguments has foreach=true with fused {name}; expected one of them. "
            f"Set fused: false in the arguments too",
            key="optimizer.arguments",
        )
    arguments.pop("foreach", None)
    record, named, make = _FUSED[name]
    fields = {field.name for field in dataclasses.fields(record)}
    _refuse_unknown(name, arguments, fields - set(named))
    _refuse_unused(name, settings, set(named))
    given: dict[str, Any] = {key: getattr(settings, key) for key in named}
    if "betas" in given:
        given["betas"] = tuple(given["betas"])
    return make(record(**given, **arguments))


def _refuse_unknown(name: str, arguments: dict[str, Any], known: set[str]) -> None:
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"optimizer.arguments.{key} is not an argument of {name}; expected one of "
                f"{', '.join(sorted(known))}{hint}",
                key=f"optimizer.arguments.{key}",
                found=key,
                expected=", ".join(sorted(known)),
            )


def _refuse_unused(name: str, settings: OptimizerConfig, used: set[str]) -> None:
    """A setting that was changed but has no effect is a mistake to be told."""
    for key in _NAMED:
        if key not in used and _differs_from_default(settings, key) and getattr(settings, key):
            raise ConfigError(
                f"optimizer.{key}={getattr(settings, key)} has no effect: {name} does not take it. "
                f"Leave it out",
                key=f"optimizer.{key}",
                found=str(getattr(settings, key)),
                expected="unset",
            )


def _differs_from_default(settings: OptimizerConfig, key: str) -> bool:
    field = next(field for field in dataclasses.fields(settings) if field.name == key)
    if field.default_factory is not dataclasses.MISSING:
        return list(getattr(settings, key)) != list(field.default_factory())
    return bool(getattr(settings, key) != field.default)


def find_class(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of that import path, or of that name in `torch.optim` in any case of letters.

    An error inside the user's module comes through as it is, with its file and line.

    Raises:
        ConfigError: There is none.
    """
    found: object = None
    module_name, _, class_name = name.rpartition(".")
    if module_name:
        try:
            found = getattr(importlib.import_module(module_name), class_name, None)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise  # something that the module itself imports is missing
    else:
        found = _torch_classes().get(name.lower())
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        near = difflib.get_close_matches(name.lower(), _torch_classes(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"optimizer.name={name} is not an optimizer class; expected adamw, adam, sgd, adagrad, or the "
            f"import path of a subclass of torch.optim.Optimizer{hint}",
            key="optimizer.name",
            found=name,
            expected="an optimizer's name or import path",
        )
    return found


def _torch_classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): member
        for name, member in vars(torch.optim).items()
        if inspect.isclass(member) and issubclass(member, torch.optim.Optimizer)
    }


def _class_arguments(
    optimizer: type[torch.optim.Optimizer], settings: OptimizerConfig, arguments: dict[str, Any]
) -> dict[str, Any]:
    """What the class is constructed with, but for the parameters and lr."""
    name = optimizer.__name__
    parameters = inspect.signature(optimizer).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any:
        _refuse_unknown(name, arguments, set(parameters) - {"params", "lr"})
    given: dict[str, Any] = {}
    for key in _NAMED:
        value = getattr(settings, key)
        wanted = key == "weight_decay" or _differs_from_default(settings, key)
        if key in arguments or not wanted:
            continue
        if key in parameters and _fits(value, parameters[key].default):
            given[key] = tuple(value) if key == "betas" else value
        elif _differs_from_default(settings, key) and value:
            raise ConfigError(
                f"optimizer.{key}={value} cannot be given to {name}. Leave it out, or set what the class "
                f"takes in optimizer.arguments",
                key=f"optimizer.{key}",
                found=str(value),
                expected="unset",
            )
    return {**given, **{key: _plain(value) for key, value in arguments.items()}}


def _fits(value: object, default: object) -> bool:
    """Whether a class whose default is `default` means the same by that name: Adafactor's eps is a pair."""
    if default is inspect.Parameter.empty:
        return True
    return isinstance(default, tuple) == isinstance(value, (list, tuple))


def _plain(value: object) -> object:
    """Lists of a configuration file as the tuples that torch's classes want."""
    return tuple(value) if isinstance(value, list) else value


_SHORT_NAMES = {
    "torch.optim.AdamW": "adamw",
    "torch.optim.Adam": "adam",
    "torch.optim.SGD": "sgd",
    "torch.optim.Adagrad": "adagrad",
}

#: short name -> its record of settings, those of them that the configuration names, and its kernel
_FUSED: dict[str, tuple[type[Any], tuple[str, ...], Callable[[Any], UpdateKernel]]] = {
    "adamw": (
        fused.AdamSettings,
        ("betas", "eps", "weight_decay"),
        lambda settings: fused.FusedAdam(settings, decoupled=True),
    ),
    "adam": (
        fused.AdamSettings,
        ("betas", "eps", "weight_decay"),
        lambda settings: fused.FusedAdam(settings, decoupled=False),
    ),
    "sgd": (fused.SGDSettings, ("momentum", "weight_decay"), fused.FusedSGD),
    "adagrad": (fused.AdagradSettings, ("eps", "weight_decay"), fused.FusedAdagrad),
}
