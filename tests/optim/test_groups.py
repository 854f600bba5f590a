"""Param groups by name, and a plan's optimizer as schedulers see it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.api import Session
from stages.api_optimizer import optimizer_settings
from stages.artifacts import graph as g
from stages.artifacts.errors import ConfigError
from stages.config import SchedulerConfig
from stages.optim.groups import PlannedOptimizer, make_groups
from stages.optim.schedule import make_schedule
from tests.cases.sessions import (
    LEARNING_RATE,
    assert_same,
    frugal,
    placed,
    prepared,
    seeded,
    train,
    train_plainly,
)
from tests.models_for_tests import BY_NAME
from tests.parity import harness

MODEL = BY_NAME["gpt2"]
GROUPS = [
    {"pattern": "*.bias", "weight_decay": 0.0},
    {"pattern": ["*attn*", "*.mlp.*"], "lr": 0.003, "betas": [0.8, 0.9]},
    {"pattern": "*adapter*", "optional": True, "lr": 7.0},
]


def parameters() -> list[g.Parameter]:
    return harness.traced(MODEL, "fp32", 2)[0].parameters


def torch_groups(named: Any) -> list[dict[str, Any]]:
    """The same groups as torch has them."""
    biases = [p for name, p in named.items() if name.endswith(".bias")]
    blocks = [p for n, p in named.items() if not n.endswith(".bias") and ("attn" in n or ".mlp." in n)]
    taken = {id(p) for p in (*biases, *blocks)}
    rest = [p for p in named.values() if id(p) not in taken]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": blocks, "lr": 0.003, "betas": (0.8, 0.9)},
        {"params": [], "lr": 7.0},
        {"params": rest},
    ]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_groups_within_one_region_train_as_torchs(precision: str, tmp_path: Path) -> None:
    batches, settings = MODEL.batches(2), {"precision": precision, "max_grad_norm": 0.5}
    model = seeded(MODEL.build)
    before = placed(prepared(model, batches[0], param_groups=GROUPS, **settings), tmp_path)
    with Session(model, before, frugal(before)) as session:
        assert [len(group["params"]) > 0 for group in session.optimizer.param_groups] == [
            True,
            True,
            False,
            True,
        ]
        found = train(session, batches, steps=6)
    expected = train_plainly(
        MODEL.build, batches, steps=6, precision=precision, groups=torch_groups, max_grad_norm=0.5
    )
    assert_same(found, expected)


def test_an_optimizer_of_ones_own_gives_class_settings_and_groups(tmp_path: Path) -> None:
    batches, model = MODEL.batches(2), seeded(MODEL.build)

    def make(given: list[Any]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(given, lr=LEARNING_RATE, momentum=0.5)

    def split(named: Any) -> list[dict[str, Any]]:
        values = list(named.values())
        return [{"params": values[:5], "lr": 0.001}, {"params": values[5:], "momentum": 0.0}]

    own = make(split(dict(model.named_parameters())))
    before = placed(prepared(model, batches[0], optimizer=own), tmp_path)
    with Session(model, before, frugal(before)) as session:
        found = train(session, batches, steps=3)
    expected = train_plainly(MODEL.build, batches, steps=3, optimizer=make, groups=split)
    assert_same(found, expected)


def test_a_pattern_that_matches_nothing_is_refused_unless_optional() -> None:
    settings = optimizer_settings("adamw", 0.1, {}, [{"pattern": "*.biass", "lr": 0.0}])
    with pytest.raises(ConfigError, match=r"groups\[0\].*biass.*optional"):
        make_groups(settings, parameters(), "fp32")


def test_the_first_pattern_wins() -> None:
    entries = [{"pattern": "*ln_f*", "lr": 1.0}, {"pattern": "*", "lr": 2.0}]
    groups = make_groups(optimizer_settings("adamw", 0.1, {}, entries), parameters(), "fp32")
    assert groups.groups[0].parameters == ("transformer.ln_f.weight", "transformer.ln_f.bias")
    assert groups.groups[2].parameters == ()


@pytest.mark.parametrize("entry", [{"lr": 1.0}, {"pattern": "*", "name": "sgd"}])
def test_groups_that_cannot_be_are_refused_in_the_configuration(entry: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"groups\[0\]"):
        optimizer_settings("adamw", 0.1, {}, [entry])


@pytest.mark.parametrize("name", ["LBFGS", "tests.optim.optimizers_for_tests.Missing"])
def test_optimizers_that_cannot_be_planned_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"closure|not an optimizer class"):
        make_groups(optimizer_settings(name, 0.1, {}), parameters(), "fp32")


def facade(name: str = "sgd", **settings: Any) -> PlannedOptimizer:
    return PlannedOptimizer(make_groups(optimizer_settings(name, 0.1, settings), parameters(), "fp32"))


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_our_schedules_rise_to_the_learning_rate_and_end_at_the_last_step(name: str) -> None:
    optimizer = facade()
    schedule = make_schedule(SchedulerConfig(name, warmup=2, final=0.1), optimizer, 6)
    rates = []
    for _ in range(6):
        rates.append(optimizer.rates().learning_rates[0])
        schedule.advance(0.0)
    assert rates[:3] == pytest.approx([0.05, 0.1, 0.1])
    assert rates[-1] == pytest.approx(0.01)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_plateaus_are_judged_by_the_loss_and_replayed() -> None:
    config = SchedulerConfig("ReduceLROnPlateau", arguments={"patience": 0, "factor": 0.5})
    losses, optimizer, again = [3.0, 2.0, 2.0, 2.0], facade(), facade()
    schedule = make_schedule(config, optimizer, 9)
    for loss in losses:
        schedule.advance(loss)
    make_schedule(config, again, 9).replay(losses)
    assert again.rates().learning_rates == optimizer.rates().learning_rates == (0.025,)


def test_momentum_that_a_schedule_switches_on_needs_its_buffer_from_the_start() -> None:
    optimizer = facade()
    make_schedule(SchedulerConfig("OneCycleLR", arguments={"max_lr": 1.0}), optimizer, 9)
    with pytest.raises(ConfigError, match="momentum"):
        optimizer.rates()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("CosineAnealingLR", {}), ("StepLR", {"step": 3}), ("LambdaLR", {"lr_lambda": "math.pie"})],
)
def test_schedules_that_cannot_be_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="scheduler"):
        make_schedule(SchedulerConfig(name, arguments=arguments), facade(), 9)


def test_a_planned_optimizer_and_its_schedule_hold_no_compiler() -> None:
    script = (
        "import sys\n"
        "from stages.config import OptimizerConfig, SchedulerConfig\n"
        "from stages.optim.groups import PlannedOptimizer, make_groups\n"
        "from stages.optim.schedule import make_schedule\n"
        "optimizer = PlannedOptimizer(make_groups(OptimizerConfig('adamw'), [], 'fp32'))\n"
        "schedule = make_schedule(SchedulerConfig('OneCycleLR', arguments={'max_lr': 1.0}), optimizer, 9)\n"
        "schedule.advance(1.0)\n"
        "assert optimizer.rates().kernels[0].settings()['betas'] != (0.9, 0.999)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
