"""What no model could be trained with is refused before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.artifacts.errors import ConfigError
from stages.config import OptimizerConfig, RunConfig
from stages.optim.check import check_settings
from stages.training import SchedulerConfig
from tests.cases.commands import run


def config(name: str = "adamw", scheduler: SchedulerConfig | None = None, **settings: Any) -> RunConfig:
    return RunConfig(
        optimizer=OptimizerConfig(name=name, **settings),
        scheduler=scheduler or SchedulerConfig("none"),
        precision="fp32",
        steps=5,
    )


def test_what_can_be_passes() -> None:
    check_settings(config(groups=[{"pattern": "*.bias", "weight_decay": 0.0}]))
    check_settings(config("sgd", SchedulerConfig("cosine", warmup=2), momentum=0.9))
    check_settings(config("torch.optim.Adafactor", SchedulerConfig("StepLR", arguments={"step_size": 3})))
    check_settings(config(scheduler=SchedulerConfig("OneCycleLR", arguments={"max_lr": 0.1})))


@pytest.mark.parametrize(
    ("made", "key"),
    [
        (config("LBFGS"), "optimizer.name"),
        (config("adamv"), "optimizer.name"),
        (config(arguments={"betta": 1}), "optimizer.arguments"),
        (config(groups=[{"pattern": "*", "betta": 1}]), "optimizer"),
        (config(scheduler=SchedulerConfig("StepLR", arguments={"step": 3})), "scheduler.arguments"),
        (config(scheduler=SchedulerConfig("CosineAnealingLR")), "scheduler.name"),
        (config("sgd", SchedulerConfig("OneCycleLR", arguments={"max_lr": 1.0})), ""),
    ],
)
def test_what_cannot_be_is_refused_by_key(made: RunConfig, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_settings(made)
    assert refusal.value.key.startswith(key)


def test_the_command_refuses_before_it_traces(tmp_path: Path) -> None:
    done = run(tmp_path, "+model=mlp", "budget=1GB", "scheduler=torch", "scheduler.name=NoSuchLR")
    assert done.code == 2, done.stdout + done.stderr
    assert "NoSuchLR" in done.stderr
    assert list((tmp_path / "store").rglob("*.json")) == []
