"""Whether an optimizer and its schedule can be, before there is a model: a refusal then costs no tracing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from stages.optim.groups import PlannedOptimizer, make_groups
from stages.optim.schedule import make_schedule

if TYPE_CHECKING:
    from stages.config import RunConfig


def check_settings(config: RunConfig) -> None:
    """Makes both for a model without parameters.

    Raises:
        ConfigError: No such optimizer or scheduler, one that cannot be planned, or arguments that it does
            not take. Whether patterns of groups match anything is for the model to tell.
    """
    groups = [{**group, "optional": True} for group in config.optimizer.groups]
    settings = dataclasses.replace(config.optimizer, groups=groups)
    optimizer = PlannedOptimizer(make_groups(settings, [], config.precision))
    make_schedule(config.scheduler, optimizer, config.steps)
    optimizer.rates()
