"""What `stages.offload` and the command make of the same optimizer is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stages.api import optimizer_settings
from stages.cli import compose


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_unset_arguments_are_those_of_the_command(name: str) -> None:
    composed = compose(["model=mlp", "budget=1GB", f"optimizer={name}"]).optimizer
    assert optimizer_settings(name, composed.lr, {}) == composed


def test_a_class_has_no_weight_decay_unless_asked() -> None:
    composed = compose(
        ["model=mlp", "budget=1GB", "optimizer=torch", "optimizer.name=torch.optim.RMSprop"]
    ).optimizer
    made = optimizer_settings(composed.name, composed.lr, {"centered": True})
    assert made == replace(composed, arguments={"centered": True})
