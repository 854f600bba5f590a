"""Any optimizer class on one parameter at a time: bitwise the class, its state in flat tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stages.artifacts.costs import StateSpec
from stages.artifacts.errors import ConfigError
from stages.optim.by_class import ClassKernel

SHAPES = [(67, 19), (1003,), (5, 3, 3), ()]
CLASSES = [
    "Adafactor",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


def compare(
    make: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
    shape: tuple[int, ...],
    *,
    dtype: torch.dtype = torch.float32,
    transposed: bool = False,
) -> None:
    """Trains the class and the kernel alike for five steps with a changing learning rate."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(shape, generator=generator, dtype=dtype)
    if transposed:
        weight = weight.t()
    parameter = torch.nn.Parameter(weight.clone(memory_format=torch.preserve_format))
    optimizer = make([parameter], lr=1e-2, **arguments)  # type: ignore[call-arg]
    kernel = ClassKernel(make, arguments)
    flat = weight.clone(memory_format=torch.preserve_format).as_strided((weight.numel(),), (1,))
    states = kernel.init_state("weight", weight)
    assert {name: (state.numel(), state.dim()) for name, state in states.items()} == {
        spec.name: (spec.elements, 1)
        for spec in kernel.state_specs(weight.shape, str(dtype).removeprefix("torch."))
    }
    for step in range(1, 6):
        lr = 1e-2 / step
        gradient = torch.randn(weight.numel(), generator=generator, dtype=dtype)
        optimizer.param_groups[0]["lr"] = lr
        parameter.grad = gradient.as_strided(weight.shape, weight.stride()).clone(
            memory_format=torch.preserve_format
        )
        optimizer.step()
        moved = {name: state.clone() for name, state in states.items()}  # as if to disk and back
        kernel.update(flat, gradient, moved, step, lr, shape=weight.shape, stride=weight.stride())
        states = moved
    assert torch.equal(flat.as_strided(weight.shape, weight.stride()), parameter.detach())


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torchs_own_classes(name: str, shape: tuple[int, ...]) -> None:
    compare(getattr(torch.optim, name), {}, shape)


@pytest.mark.parametrize("name", ["Adafactor", "AdamW", "Muon"])
def test_parameters_whose_memory_is_transposed(name: str) -> None:
    compare(getattr(torch.optim, name), {}, (17, 9), transposed=True)


def test_double_precision() -> None:
    compare(torch.optim.AdamW, {}, (33,), dtype=torch.float64)


def test_arguments_that_add_state() -> None:
    compare(torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, (33,))
    compare(torch.optim.Adam, {"amsgrad": True}, (33,))
    compare(torch.optim.RMSprop, {"momentum": 0.9, "centered": True}, (33,))


def test_factored_state_is_small_and_the_count_of_steps_is_not_kept() -> None:
    kernel = ClassKernel(torch.optim.Adafactor, {})
    assert kernel.state_specs((7, 3)) == [
        StateSpec("row_var", 7, "float32"),
        StateSpec("col_var", 3, "float32"),
    ]
    assert not kernel.chunkable
    assert kernel.implementation == "torch.optim.Adafactor"


class Peculiar(torch.optim.Optimizer):
    """Keeps numbers, None, and a tensor that it replaces instead of changing; counts backwards."""

    def __init__(self, params: Any, lr: float = 0.1, *, start: int = 100) -> None:
        super().__init__(params, {"lr": lr, "start": start})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=group["start"], decay=1.0, warm=False, extra=None)
                    state["average"] = parameter.clone()
                state["step"] -= 1
                state["decay"] *= 0.7
                state["warm"] = state["step"] % 2 == 0
                state["average"] = state["average"] * 0.9 + parameter.grad * 0.1
                factor = state["decay"] * state["step"] / group["start"] * (2.0 if state["warm"] else 1.0)
                parameter.sub_(state["average"] * group["lr"] * factor)


def test_a_users_class_with_numbers_none_and_replaced_tensors() -> None:
    compare(Peculiar, {"start": 7}, (13,))
    names = [spec.name for spec in ClassKernel(Peculiar, {}).state_specs((13,))]
    assert names == ["step", "decay", "warm", "average"], "only torch's own 'step' is known to be a count"


class _Base(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def grads(self) -> list[torch.Tensor]:
        return [parameter.grad for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"] * self.factor(parameter))

    def factor(self, parameter: torch.Tensor) -> Any:
        return 1.0


class ClipsTogether(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        return 1.0 / torch.stack([grad.norm() for grad in self.grads()]).norm()


class Remembers(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return 1.0


class RemembersInGroup(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        group = self.param_groups[0]
        group["distance"] = group.get("distance", torch.zeros(())) + parameter.norm()
        return 1.0


class Draws(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        return torch.rand_like(parameter)


class Grows(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        history = self.state[parameter].get("history", torch.zeros(0))
        self.state[parameter]["history"] = torch.cat([history, parameter.norm().reshape(1)])
        return 1.0


class KeepsALists(_Base):
    def factor(self, parameter: torch.Tensor) -> Any:
        self.state[parameter]["past"] = [1, 2]
        return 1.0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "needs a closure"),
        (torch.optim.SparseAdam, "does not support dense gradients"),
        (ClipsTogether, "depend on another"),
        (Remembers, "keeps calls outside the state"),
        (RemembersInGroup, r"keeps group\['distance'\] outside"),
        (Draws, "draws random numbers"),
    ],
)
def test_what_cannot_be_updated_alone_is_refused(make: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        ClassKernel(make, {})
    assert refusal.value.key == "optimizer.name"


@pytest.mark.parametrize(("make", "reason"), [(Grows, "changes its shape"), (KeepsALists, "of type list")])
def test_state_that_cannot_be_moved_is_refused(make: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ClassKernel(make, {}).state_specs((3,))


def test_a_shape_that_the_class_does_not_take_is_refused_with_its_own_words() -> None:
    with pytest.raises(ConfigError, match="Muon only supports 2D parameters"):
        ClassKernel(torch.optim.Muon, {}).state_specs((5,))


def test_arguments_that_the_class_refuses_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="Invalid"):
        ClassKernel(torch.optim.RMSprop, {"alpha": -1.0})


def test_probing_leaves_the_random_state_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ClassKernel(torch.optim.Adafactor, {}).state_specs((3, 4))
    with pytest.raises(ConfigError):
        ClassKernel(Draws, {})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_shape_is_needed() -> None:
    kernel = ClassKernel(torch.optim.Adafactor, {})
    with pytest.raises(ValueError, match="needs their shape"):
        kernel.update(torch.zeros(4), torch.zeros(4), {}, 1, 0.1)
    with pytest.raises(ValueError, match="expected all"):
        kernel.update(torch.zeros(4), torch.zeros(4), {}, 1, 0.1, shape=(4, 4))


def test_low_precision_masters_are_updated_by_a_class_too() -> None:
    kernel = ClassKernel(torch.optim.Adafactor, {})
    original = torch.linspace(-1, 1, 12).reshape(3, 4)
    master, weight = original.reshape(-1).clone(), original.reshape(-1).bfloat16()
    parameter = torch.nn.Parameter(original.clone())
    optimizer = torch.optim.Adafactor([parameter], lr=0.1)
    states = kernel.init_state("weight", original)
    for step in (1, 2):
        gradient = torch.linspace(1, 2, 12).bfloat16()
        parameter.grad = gradient.float().reshape(3, 4)
        optimizer.step()
        kernel.update_low_precision(weight, master, gradient, states, step, 0.1, shape=(3, 4))
    assert torch.equal(master.reshape(3, 4), parameter.detach())
    assert torch.equal(weight, master.bfloat16())
