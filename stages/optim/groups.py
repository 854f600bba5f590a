"""Param groups: which parameter is updated with which settings, chosen by name."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.optim.kernel import UpdateKernel
from stages.optim.make import make_kernel

if TYPE_CHECKING:
    from stages.config import OptimizerConfig

#: keys of a group that choose parameters; all others are settings
SELECTORS = ("pattern", "optional")


@dataclass(frozen=True)
class Group:
    """Parameters that share settings. settings: of the optimizer class by name, lr among them."""

    pattern: str
    kernel: UpdateKernel
    settings: dict[str, Any]
    parameters: tuple[str, ...]


class Groups:
    """All groups, in the order of the configuration; what no pattern matches makes the last one."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = tuple(groups)
        self._index = {name: index for index, group in enumerate(groups) for name in group.parameters}

    @property
    def base(self) -> UpdateKernel:
        """The update with the settings of the configuration itself."""
        return self.groups[-1].kernel

    def index(self, name: str) -> int:
        return self._index.get(name, len(self.groups) - 1)

    def of(self, name: str) -> UpdateKernel:
        """The update of a parameter."""
        return self.groups[self.index(name)].kernel


def make_groups(settings: OptimizerConfig, parameters: Sequence[g.Parameter], precision: str) -> Groups:
    """The groups of a model's trained parameters.

    The first group with a pattern (as in a shell) that matches one of a parameter's names has it. A group
    may end up empty; schedulers see it all the same.

    Raises:
        ConfigError: A pattern matches no parameter and is not `optional`, or an optimizer cannot take a
            setting.
    """
    left = {p.name: p.names or [p.name] for p in parameters if p.role == "parameter" and p.requires_grad}
    every = {p.name: p.names or [p.name] for p in parameters if p.role == "parameter"}
    found = []
    for number, entry in enumerate(settings.groups):
        patterns = [entry["pattern"]] if isinstance(entry["pattern"], str) else list(entry["pattern"])
        if not entry.get("optional", False):
            for pattern in patterns:
                _require_a_match(pattern, every, number)
        chosen = tuple(name for name, names in left.items() if any(map(_matcher(patterns), names)))
        for name in chosen:
            del left[name]
        found.append(_group(", ".join(patterns), _with(settings, entry), chosen, precision))
    found.append(_group("*", settings, tuple(left), precision))
    return Groups(found)


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)


def _require_a_match(pattern: str, names: Mapping[str, Sequence[str]], number: int) -> None:
    if not any(fnmatchcase(alias, pattern) for aliases in names.values() for alias in aliases):
        raise ConfigError(
            f"optimizer.groups[{number}] has the pattern {pattern!r}, which matches no parameter (they are "
            f"named as {next(iter(names), 'none')}); correct it, or set optional: true in that group",
            key=f"optimizer.groups[{number}].pattern",
            found=pattern,
            expected="a pattern that matches a parameter's name",
        )


def _with(settings: OptimizerConfig, entry: Mapping[str, Any]) -> OptimizerConfig:
    """The configuration of one group: its own settings before those of all."""
    own = {key: value for key, value in entry.items() if key not in SELECTORS}
    fields = {field.name for field in dataclasses.fields(settings)} - {"name", "groups", "arguments"}
    named = {key: value for key, value in own.items() if key in fields}
    rest = {key: value for key, value in own.items() if key not in fields}
    return dataclasses.replace(settings, **named, arguments={**settings.arguments, **rest})


def _group(pattern: str, settings: OptimizerConfig, parameters: tuple[str, ...], precision: str) -> Group:
    kernel = make_kernel(settings.name, settings, precision)
    return Group(pattern, kernel, {**kernel.settings(), "lr": settings.lr}, parameters)


@dataclass(frozen=True)
class Rates:
    """How one step updates: each group's kernel with its present settings, and its learning rate."""

    groups: Groups
    kernels: tuple[UpdateKernel, ...]
    learning_rates: tuple[float, ...]

    def of(self, name: str) -> tuple[UpdateKernel, float]:
        """Of a parameter."""
        index = self.groups.index(name)
        return self.kernels[index], self.learning_rates[index]


class PlannedOptimizer(torch.optim.Optimizer):
    """A plan's optimizer as torch's schedulers know one: settings by group, and no tensors.

    What a scheduler (or anybody) writes into `param_groups` holds from the next update on. `step` takes note
    of an update that the plan has made.
    """

    def __init__(self, groups: Groups) -> None:
        # not the base class's: adding a group there imports the compiler, which takes 73 MB
        self._groups = groups
        self.defaults = dict(groups.groups[-1].settings)
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._warned_capturable_if_run_uncaptured = True
        self.param_groups: list[dict[str, Any]] = [
            {"params": [torch.nn.Parameter(torch.empty(0)) for _ in group.parameters], **group.settings}
            for group in groups.groups
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """An update has been made.

        Raises:
            ConfigError: A closure is given: the plan runs the model, not the optimizer.
        """
        if closure is not None:
            raise ConfigError("this optimizer takes no closure: the session runs the model", key="optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: gradients end with the update."""

    def rates(self, learning_rate: float | None = None) -> Rates:
        """What the next update uses.

        Args:
            learning_rate: In place of every group's.

        Raises:
            ConfigError: A setting has become one that the planned state does not allow.
        """
        kernels, rates = [], []
        for group, present in zip(self._groups.groups, self.param_groups, strict=True):
            changed = {
                key: present[key]
                for key, value in group.settings.items()
                if key != "lr" and present[key] is not value and present[key] != value
            }
            kernels.append(group.kernel.with_settings(changed) if changed else group.kernel)
            rates.append(float(present["lr"]) if learning_rate is None else learning_rate)
        return Rates(self._groups, tuple(kernels), tuple(rates))
