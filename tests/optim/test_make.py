"""From configuration to kernel: names, arguments, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stages.artifacts.errors import ConfigError
from stages.config import OptimizerConfig
from stages.optim import UpdateKernel, make_kernel


def kernel_of(name: str, **settings: Any) -> UpdateKernel:
    return make_kernel(name, OptimizerConfig(name, **settings), "fp32")


@pytest.mark.parametrize(
    ("name", "arguments", "implementation"),
    [
        ("adamw", {}, "fused_adamw"),
        ("adam", {}, "fused_adam"),
        ("sgd", {}, "fused_sgd"),
        ("adagrad", {}, "fused_adagrad"),
        ("adamw", {"fused": True, "foreach": False}, "fused_adamw"),
        ("adamw", {"fused": False}, "torch.optim.AdamW"),
        ("torch.optim.AdamW", {}, "torch.optim.AdamW"),
        ("torch.optim.AdamW", {"fused": True}, "fused_adamw"),
        ("rmsprop", {}, "torch.optim.RMSprop"),
        ("torch.optim.Adafactor", {}, "torch.optim.Adafactor"),
    ],
)
def test_a_name_says_which_implementation(name: str, arguments: dict[str, Any], implementation: str) -> None:
    assert kernel_of(name, arguments=arguments).implementation == implementation


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("adanw", "did you mean adamw"),
        ("torch.optim.Adaw", "import path"),
        ("torch.nn.Linear", "subclass"),
        ("no_such_package.Optimizer", "import path"),
        ("torch.optim", "import path"),
    ],
)
def test_an_unknown_optimizer_is_refused_by_name(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as refusal:
        kernel_of(name)
    assert refusal.value.key == "optimizer.name"
    assert refusal.value.found == name


def test_a_mistyped_argument_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean amsgrad"):
        kernel_of("adamw", arguments={"amsgard": True})
    with pytest.raises(ConfigError, match="not an argument of Adafactor"):
        kernel_of("torch.optim.Adafactor", arguments={"treshold": 1})


def test_a_setting_that_has_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.momentum=0\.9 has no effect"):
        kernel_of("adamw", momentum=0.9)
    with pytest.raises(ConfigError, match=r"optimizer\.betas.* cannot be given to Adadelta"):
        kernel_of("torch.optim.Adadelta", betas=[0.8, 0.9])
    with pytest.raises(ConfigError, match=r"optimizer\.eps=1e-05 cannot be given to Adafactor"):
        kernel_of("torch.optim.Adafactor", eps=1e-5)


def test_foreach_and_fused_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="foreach"):
        kernel_of("adamw", arguments={"foreach": True})


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        make_kernel("adamw", OptimizerConfig("adamw"), "fp8")


def test_arguments_reach_the_class_and_lists_become_tuples() -> None:
    kernel = kernel_of("torch.optim.Adafactor", weight_decay=0.0, arguments={"eps": [None, 0.01], "d": 2.0})
    weight = torch.linspace(-1, 1, 12)
    parameter = torch.nn.Parameter(weight.reshape(3, 4).clone())
    optimizer = torch.optim.Adafactor([parameter], lr=0.1, eps=(None, 0.01), d=2.0, weight_decay=0.0)
    parameter.grad = torch.ones(3, 4)
    optimizer.step()
    kernel.update(weight, torch.ones(12), kernel.init_state("w", weight.reshape(3, 4)), 1, 0.1, shape=(3, 4))
    assert torch.equal(weight.reshape(3, 4), parameter.detach())


def test_a_class_keeps_its_own_defaults_where_the_configuration_is_silent() -> None:
    """Muon's momentum is 0.95, not the schema's 0."""
    kernel = kernel_of("torch.optim.Muon", weight_decay=0.1)
    weight = torch.linspace(-1, 1, 12)
    parameter = torch.nn.Parameter(weight.reshape(3, 4).clone())
    optimizer = torch.optim.Muon([parameter], lr=0.1)
    states = kernel.init_state("w", weight.reshape(3, 4))
    for step in (1, 2):
        parameter.grad = torch.ones(3, 4)
        optimizer.step()
        kernel.update(weight, torch.ones(12), states, step, 0.1, shape=(3, 4))
    assert torch.equal(weight.reshape(3, 4), parameter.detach())


def test_an_error_in_the_users_module_comes_through_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_optimizers.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_missing"):
        kernel_of("users_optimizers.Mine")
