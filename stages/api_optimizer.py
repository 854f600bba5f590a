"""The optimizer of `stages.offload` as a configuration: by name and arguments, or from one that was made."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stages.artifacts.errors import ConfigError
from stages.config import OptimizerConfig

_OPTIMIZER_FIELDS = ("betas", "eps", "weight_decay", "momentum")


def optimizer_settings(
    name: str, lr: float, arguments: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()
) -> OptimizerConfig:
    """The configuration that the command would compose for this optimizer.

    Raises:
        ConfigError: A value cannot be used.
    """
    named = {key: value for key, value in arguments.items() if key in _OPTIMIZER_FIELDS}
    rest = {key: value for key, value in arguments.items() if key not in named}
    decays = name.lower().rpartition(".")[2] == "adamw"
    named.setdefault("weight_decay", 0.01 if decays else 0.0)
    return OptimizerConfig(name=name, lr=lr, arguments=rest, groups=[dict(item) for item in groups], **named)


def settings_of_instance(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerConfig:
    """The configuration of an optimizer that was made for the model and has made no step.

    Raises:
        ConfigError: It has state, or parameters that are not the model's, or leaves out some that train.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    missing = [name for parameter, name in names.items() if parameter.requires_grad]
    known = {names.get(parameter) for parameter in held}
    problem = "state already" if optimizer.state else ""
    problem = problem or ("parameters that are not the model's" if None in known else "")
    left = next((name for name in missing if name not in known), "")
    problem = problem or (f"no {left}, which trains" if left else "")
    if problem:
        raise ConfigError(
            f"the optimizer has {problem}; expected a new one of all parameters that train (freeze others)",
            key="optimizer",
            found=problem,
        )
    kind = type(optimizer)
    path = f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim.") else ""
    # what only a group of the class has (a scheduler's notes) is not an argument
    taken = [key for key in inspect.signature(kind).parameters if key not in ("params", "lr")]
    groups = []
    for group in optimizer.param_groups:
        patterns = [glob.escape(names[parameter]) for parameter in group["params"]]
        settings = {key: _as_written(group[key]) for key in taken if group.get(key) is not None}
        pattern = patterns or ["an empty group"]
        groups.append({"pattern": pattern, "optional": not patterns, "lr": float(group["lr"]), **settings})
    return OptimizerConfig(
        name=path or f"{kind.__module__}.{kind.__qualname__}",
        lr=float(optimizer.defaults["lr"]),
        weight_decay=0.0,
        arguments={"fused": False} if path and "fused" in taken and not optimizer.defaults["fused"] else {},
        groups=groups,
    )


def _as_written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
