"""What a trace would lose or get wrong is refused, with module, file and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stages.artifacts.errors import TraceError
from stages.config import DataConfig, ModelConfig, RunConfig
from stages.trace.stage import run, trace_module
from tests.models_for_tests import BY_NAME

HERE = re.escape(str(Path(__file__)))


class Body(nn.Module):
    """A linear layer and whatever `change` does to its output, in a submodule called inner."""

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(change)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


class Inner(nn.Module):
    table: Tensor

    def __init__(self, change: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(4))
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        return self._change(self, self.linear(x))


def refusal(module: nn.Module, *args: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        trace_module(module, args or (torch.randn(3, 4),))
    return caught.value


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def hook(module: nn.Module, y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: 2 * gradient)
    return y


def branch(module: nn.Module, y: Tensor) -> Tensor:
    return y * 2 if y.sum() > 0 else y


def read_value(module: nn.Module, y: Tensor) -> Tensor:
    return y * y.max().item()


def data_sized(module: nn.Module, y: Tensor) -> Tensor:
    return y[y > 0]


def custom(module: nn.Module, y: Tensor) -> Tensor:
    return Double.apply(y)


@pytest.mark.parametrize("change", [custom, hook])
def test_gradients_in_python_are_refused_with_module_and_line(change: Callable[..., Tensor]) -> None:
    message = str(refusal(Body(change)))
    assert re.search(rf"{HERE}:\d+", message)
    assert "'inner'" in message
    assert "gradient" in message


@pytest.mark.parametrize("change", [branch, read_value, data_sized])
def test_dependence_on_data_is_refused_with_module_and_line(
    change: Callable[..., Tensor], capfd: pytest.CaptureFixture[str]
) -> None:
    error = refusal(Body(change))
    assert capfd.readouterr().err == "", "the message is all that is shown"
    assert re.search(rf"(test_refusals\.py|{HERE}):\d+", str(error))
    assert "'inner'" in str(error)


@pytest.mark.parametrize("name", ["straight_through", "hooked"])
def test_the_small_models_that_lose_gradients_are_refused(name: str) -> None:
    small = BY_NAME[name]
    with pytest.raises(TraceError, match=r"models_for_tests\.py:\d+"):
        trace_module(small.build(), (), small.batches(1)[0])


def test_blooms_own_gelu_is_refused_by_name() -> None:
    config = RunConfig(
        model=ModelConfig(
            "bloom", "transformers", "transformers.BloomForCausalLM", "transformers.BloomConfig",
            {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64},
        ),
        data=DataConfig("random", batch_size=2, seq_len=8),
    )  # fmt: skip
    with pytest.raises(TraceError, match=r"modeling_bloom\.py:\d+.*GeLUFunction"):
        run(config)


def test_a_custom_function_that_no_gradient_passes_is_traced() -> None:
    def without_gradient(module: nn.Module, y: Tensor) -> Tensor:
        with torch.no_grad():
            scale = Double.apply(y)
        return y * scale

    trace_module(Body(without_gradient), (torch.randn(3, 4),))


def test_registered_hooks_are_refused_before_tracing() -> None:
    module = Body(lambda module, y: y)
    module.inner.register_full_backward_hook(lambda *_: None)
    assert re.search(rf"module 'inner'.*{HERE}:\d+", str(refusal(module)))
    other = Body(lambda module, y: y)
    other.inner.linear.weight.register_hook(lambda gradient: gradient)
    assert re.search(rf"'inner.linear.weight'.*{HERE}:\d+", str(refusal(other)))


def test_changing_a_weight_or_the_batch_in_place_is_refused() -> None:
    def weight(module: nn.Module, y: Tensor) -> Tensor:
        with torch.no_grad():
            module.linear.weight.mul_(0.5)  # type: ignore[operator, union-attr]
        return y

    assert "'inner.linear.weight' in place" in str(refusal(Body(weight)))

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x[:, 0] = 0
            return self.linear(x).sum()

    assert "batch" in str(refusal(Writes()))


def test_any_other_failure_keeps_its_cause_module_and_line() -> None:
    def wrong(module: nn.Module, y: Tensor) -> Tensor:
        return y @ torch.ones(7, 7)

    error = refusal(Body(wrong))
    assert re.search(rf"{HERE}:\d+.*'inner'", str(error))
    assert error.__cause__ is not None


def test_parameters_over_one_storage_are_refused_by_name() -> None:
    module = nn.Linear(4, 4)
    module.other = nn.Parameter(torch.zeros(4, 4))
    module.other.data = module.weight.data
    assert "weight and other" in str(refusal(module)) or "other and weight" in str(refusal(module))


def config_for(target: str, **arguments: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig("m", "module", target, "", arguments, "", ["x"]),
        data=DataConfig("random", batch_size=2),
    )


def test_a_target_whose_import_raises_keeps_type_file_and_line(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken_module.py").write_text("x = 1\nraise LookupError('no such thing')\n")
    (tmp_path / "unparsable_module.py").write_text("x = 1\ny = (\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TraceError, match=r"LookupError: no such thing at .*broken_module\.py:2"):
        run(config_for("broken_module.Model"))
    with pytest.raises(TraceError, match=r"SyntaxError.*unparsable_module\.py:2"):
        run(config_for("unparsable_module.Model"))


def test_targets_that_do_not_exist_or_are_no_modules_are_refused() -> None:
    with pytest.raises(TraceError, match="Did you mean Linear"):
        run(config_for("torch.nn.Linera"))
    with pytest.raises(TraceError, match="ModuleNotFoundError"):
        run(config_for("no_such_package.Model"))
    with pytest.raises(TraceError, match="TypeError"):
        run(config_for("torch.nn.Linear", in_features=3))
    with pytest.raises(TraceError, match=r"torch\.nn\.Module"):
        run(config_for("collections.OrderedDict"))


def test_a_model_without_loss_or_without_trained_weights_is_refused() -> None:
    config = config_for("torch.nn.Embedding", num_embeddings=4, embedding_dim=2)
    config.model.inputs = ["input"]
    with pytest.raises(TraceError, match="no scalar"):
        run(config)
    frozen = Body(lambda module, y: y).requires_grad_(False)
    assert "depends on no parameter" in str(refusal(frozen))


def test_sparse_gradients_are_refused_with_file_and_line() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4, sparse=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.table(ids).sum()

    message = str(refusal(Sparse(), torch.zeros(2, 3, dtype=torch.int64)))
    assert re.search(r"test_refusals\.py:\d+: module 'table'.*sparse=False", message)


def test_16_bit_weights_that_would_train_without_a_master_are_refused() -> None:
    module = Body(lambda module, y: y.float()).bfloat16()
    batch = torch.randn(3, 4, dtype=torch.bfloat16)
    assert "precision=bf16" in str(refusal(module, batch))
    trace_module(module, (batch,), precision="bf16")


def test_an_empty_parameter_is_refused_by_name() -> None:
    module = Body(lambda module, y: y)
    module.inner.nothing = nn.Parameter(torch.zeros(0, 4))
    assert "'inner.nothing'" in str(refusal(module))


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = Body(lambda module, y: y)
    module.inner.generator = torch.Generator()  # type: ignore[assignment]
    assert "torch.Generator" in str(refusal(module))


def test_a_gradient_taken_in_forward_is_refused() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.linear(x)).sum(), x, create_graph=True)
            return (slope**2).mean()

    assert "gradient to be taken outside of forward" in str(refusal(Penalty()))


def test_a_weight_that_autocast_casts_twice_is_refused() -> None:
    def again(module: nn.Module, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module.linear(y)  # type: ignore[operator]
            return torch.tanh(y) if times == 1 else module.linear(torch.tanh(y))  # type: ignore[operator]

    times = 2
    assert re.search(
        r"'inner'|'inner.linear'.*inner\.linear\.weight a second time", str(refusal(Body(again)))
    )
    times = 1  # the call before, in Inner.forward, is outside of autocast
    trace_module(Body(again), (torch.randn(3, 4),))
