"""Fused kernels: bitwise torch's own classes, whole and in chunks, without the classes' imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.artifacts.costs import StateSpec
from stages.config import OptimizerConfig
from stages.optim import CHUNK_MULTIPLE, UpdateKernel, make_kernel

#: of weights that are awkward for vector loops: TRAPS of elementwise kernels, and around 16 lanes of fp32
SIZES = (1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 67, 1003, 1023, 1024, 1025, 2 * 1003 + 1024)

Setting = dict[str, Any]

#: configuration, torch class, and what the class is given for the same
CASES: dict[str, tuple[OptimizerConfig, type[torch.optim.Optimizer], Setting]] = {
    "adamw": (OptimizerConfig("adamw"), torch.optim.AdamW, {}),
    "adamw strong": (
        OptimizerConfig("adamw", betas=[0.8, 0.95], eps=1e-5, weight_decay=0.3),
        torch.optim.AdamW,
        {"betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.3},
    ),
    "adamw without decay": (
        OptimizerConfig("adamw", weight_decay=0.0),
        torch.optim.AdamW,
        {"weight_decay": 0.0},
    ),
    "adamw amsgrad": (
        OptimizerConfig("adamw", arguments={"amsgrad": True, "maximize": True}),
        torch.optim.AdamW,
        {"amsgrad": True, "maximize": True},
    ),
    "adam": (OptimizerConfig("adam", weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (OptimizerConfig("sgd", weight_decay=0.0), torch.optim.SGD, {}),
    "sgd momentum": (
        OptimizerConfig("sgd", momentum=0.9, weight_decay=0.01),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.01},
    ),
    "sgd damped": (
        OptimizerConfig("sgd", momentum=0.9, weight_decay=0.0, arguments={"dampening": 0.4}),
        torch.optim.SGD,
        {"momentum": 0.9, "dampening": 0.4},
    ),
    "sgd nesterov": (
        OptimizerConfig("sgd", momentum=0.9, weight_decay=0.0, arguments={"nesterov": True}),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
    "adagrad": (
        OptimizerConfig(
            "adagrad",
            eps=1e-10,
            weight_decay=0.0,
            arguments={"initial_accumulator_value": 0.1, "lr_decay": 0.01},
        ),
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.1, "lr_decay": 0.01},
    ),
}


def train_by_class(
    make: type[torch.optim.Optimizer], given_: Setting, weight: torch.Tensor, steps: int, lrs: list[float]
) -> torch.Tensor:
    parameter = weight.clone().requires_grad_()
    optimizer = make([parameter], lr=lrs[0], fused=True, **given_)  # type: ignore[call-arg]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lrs[step]
        parameter.grad = gradient_of(step, weight)
        optimizer.step()
    return parameter.detach()


def train_by_kernel(
    kernel: UpdateKernel, weight: torch.Tensor, steps: int, lrs: list[float], chunk: int
) -> torch.Tensor:
    weight = weight.clone()
    states = kernel.init_state("weight", weight)
    for step in range(steps):
        gradient = gradient_of(step, weight)
        for start in range(0, weight.numel(), chunk):
            piece = slice(start, start + chunk)
            pieces = {name: state[piece] for name, state in states.items()}
            kernel.update(weight[piece], gradient[piece], pieces, step + 1, lrs[step])
    return weight


def gradient_of(step: int, weight: torch.Tensor) -> torch.Tensor:
    return torch.randn(weight.numel(), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_chunks_equal_the_class_on_the_whole_parameter(case: str, size: int) -> None:
    config, make, given_ = CASES[case]
    weight = torch.randn(size, generator=torch.Generator().manual_seed(99))
    lrs = [1e-2, 1e-2, 3e-3, 1e-4]
    kernel = make_kernel(config.name, config, "fp32")
    expected = train_by_class(make, given_, weight, 4, lrs)
    assert kernel.chunkable
    for chunk in (CHUNK_MULTIPLE, max(size, 1)):
        assert torch.equal(train_by_kernel(kernel, weight, 4, lrs, chunk), expected)


@pytest.mark.parametrize("case", ["adamw", "adam", "sgd momentum", "adagrad"])
@pytest.mark.parametrize("chunk", [CHUNK_MULTIPLE * 64, CHUNK_MULTIPLE * 300])
def test_a_size_that_threads_share_unevenly_is_no_exception(case: str, chunk: int) -> None:
    config, make, given_ = CASES[case]
    weight = torch.randn(999_983, generator=torch.Generator().manual_seed(99))
    kernel = make_kernel(config.name, config, "fp32")
    expected = train_by_class(make, given_, weight, 2, [1e-3, 1e-3])
    assert torch.equal(train_by_kernel(kernel, weight, 2, [1e-3, 1e-3], chunk), expected)


def test_chunks_of_odd_length_would_differ_which_is_why_they_are_multiples() -> None:
    config, make, given_ = CASES["adamw"]
    weight = torch.randn(999_983, generator=torch.Generator().manual_seed(99))
    kernel = make_kernel(config.name, config, "fp32")
    expected = train_by_class(make, given_, weight, 2, [1e-3, 1e-3])
    assert not torch.equal(train_by_kernel(kernel, weight, 2, [1e-3, 1e-3], 997), expected)


@given(
    size=st.integers(1, 5000),
    blocks=st.integers(1, 3),
    lr=st.floats(1e-6, 1.0),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.9999)),
    eps=st.floats(1e-12, 1e-2),
    decay=st.floats(0.0, 0.5),
)
@settings(max_examples=60, deadline=None)
def test_adamw_equals_the_class_for_any_settings(
    size: int, blocks: int, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> None:
    config = OptimizerConfig("adamw", lr=lr, betas=list(betas), eps=eps, weight_decay=decay)
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size))
    given_ = {"betas": betas, "eps": eps, "weight_decay": decay}
    expected = train_by_class(torch.optim.AdamW, given_, weight, 3, [lr] * 3)
    kernel = make_kernel("adamw", config, "fp32")
    assert torch.equal(train_by_kernel(kernel, weight, 3, [lr] * 3, blocks * CHUNK_MULTIPLE), expected)


def test_the_state_is_named_and_sized_as_torch_does() -> None:
    kernel = make_kernel("adamw", OptimizerConfig("adamw"), "bf16")
    assert kernel.implementation == "fused_adamw"
    assert kernel.state_specs((3, 5)) == [
        StateSpec("exp_avg", 15, "float32"),
        StateSpec("exp_avg_sq", 15, "float32"),
    ]
    assert kernel.state_specs(()) == [
        StateSpec("exp_avg", 1, "float32"),
        StateSpec("exp_avg_sq", 1, "float32"),
    ]
    assert make_kernel("sgd", OptimizerConfig("sgd"), "fp32").state_specs((3,)) == []


def test_sgds_first_step_takes_the_gradient_even_where_the_buffer_holds_rubbish() -> None:
    kernel = make_kernel("sgd", OptimizerConfig("sgd", momentum=0.9, weight_decay=0.0), "fp32")
    states = {"momentum_buffer": torch.full((4,), 55.0)}
    kernel.update(torch.zeros(4), torch.ones(4), states, 1, 0.1)
    assert states["momentum_buffer"].tolist() == [1.0] * 4


def test_the_gradient_is_left_alone_and_a_weight_may_require_grad() -> None:
    kernel = make_kernel("adamw", OptimizerConfig("adamw"), "fp32")
    weight, gradient = torch.ones(5, requires_grad=True), torch.ones(5)
    kernel.update(weight, gradient, kernel.init_state("weight", weight), 1, 0.1)
    assert gradient.tolist() == [1.0] * 5
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert weight[0] < 1.0


def test_unequal_dtypes_are_refused() -> None:
    kernel = make_kernel("adamw", OptimizerConfig("adamw"), "fp32")
    states = kernel.init_state("weight", torch.zeros(4))
    with pytest.raises(ValueError, match="expected one dtype"):
        kernel.update(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), states, 1, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_updates_the_master_and_rounds_it_into_the_weight(dtype: torch.dtype) -> None:
    size, scale = 1003, 2.0**16
    kernel = make_kernel("adamw", OptimizerConfig("adamw"), "bf16")
    original = torch.randn(size, generator=torch.Generator().manual_seed(5))
    master, weight = original.clone(), original.to(dtype)
    states = kernel.init_state("weight", original)
    parameter = original.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, fused=True)
    for step in range(1, 4):
        gradient = (gradient_of(step, original) * 1e-4).to(dtype) * (scale if dtype is torch.float16 else 1.0)
        before = gradient.clone()
        inverse = 1.0 / scale if dtype is torch.float16 else 1.0
        kernel.update_low_precision(weight, master, gradient, states, step, 1e-2, inverse_scale=inverse)
        assert torch.equal(gradient, before)
        parameter.grad = gradient.float() * inverse
        optimizer.step()
        assert torch.equal(master, parameter.detach())
        assert torch.equal(weight, master.to(dtype))


def test_a_full_precision_gradient_is_not_scaled_in_place() -> None:
    kernel = make_kernel("sgd", OptimizerConfig("sgd", weight_decay=0.0), "fp16")
    master, gradient, weight = torch.zeros(3), torch.full((3,), 8.0), torch.zeros(3, dtype=torch.float16)
    kernel.update_low_precision(weight, master, gradient, {}, 1, 1.0, inverse_scale=0.25)
    assert gradient.tolist() == [8.0] * 3
    assert master.tolist() == weight.tolist() == [-2.0] * 3


def test_a_master_must_be_fp32() -> None:
    kernel = make_kernel("sgd", OptimizerConfig("sgd"), "bf16")
    half = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"expected torch\.float32"):
        kernel.update_low_precision(half, half, half, {}, 1, 1.0)


def test_a_fused_update_imports_no_dynamo() -> None:
    script = (
        "import sys, torch\n"
        "from stages.config import OptimizerConfig\n"
        "from stages.optim import make_kernel\n"
        "kernel = make_kernel('adamw', OptimizerConfig('adamw'), 'fp32')\n"
        "weight = torch.ones(2000)\n"
        "kernel.update(weight, weight, kernel.init_state('w', weight), 1, 0.1)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "assert 'sympy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
