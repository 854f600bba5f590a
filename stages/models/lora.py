"""Low-rank adapters: frozen layers with a small trained product beside them.

E. Hu and others, LoRA: Low-Rank Adaptation of Large Language Models (arXiv:2106.09685), equation 3:
y = W x + (alpha / r) B A x, with A drawn as a layer's weight is and B zero, so that training starts
from the model as it was. Names and initial values are those of the library peft.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from stages.artifacts.errors import ConfigError

#: submodules that a layer gets
DOWN, UP = "lora_A", "lora_B"
#: how the names of their weights end
WEIGHTS = (f".{DOWN}.weight", f".{UP}.weight")


class _Adapted(nn.Module):
    """Goes before a layer's own class: the layer's result and, added to it, that of the adapter."""

    lora_A: nn.Linear  # noqa: N815, the names that peft gives them
    lora_B: nn.Linear  # noqa: N815
    lora_scale: float
    lora_dropout: float

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x = functional.dropout(x, self.lora_dropout, self.training)
        return y + self.lora_B(self.lora_A(x)) * self.lora_scale


def adapt(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    dropout: float = 0.0,
    train: Sequence[str] = (),
) -> nn.Module:
    """Freezes `model` and gives its layers that `targets` name an adapter each; the model itself.

    Layers keep their class as a base and their weights their names; adapters are `LAYER.lora_A.weight`
    [rank, inputs] and `LAYER.lora_B.weight` [outputs, rank], in the dtype of the layer's weight.

    Args:
        targets: Patterns (`*` stands for anything) of module paths, whole or from some dot on:
            "query" is every layer called so, "layer.0.*.query" those of the first block.
        dropout: Of what enters an adapter.
        train: Patterns of modules or parameters that train as a whole, as a new head has to.

    Raises:
        ConfigError: A pattern names nothing, or something that is no linear layer.
    """
    layers = {path: layer for path, layer in model.named_modules() if matches(path, targets)}
    _check_patterns("lora.targets", targets, [path for path, _ in model.named_modules()])
    for path, layer in layers.items():
        if not is_linear(layer):
            raise ConfigError(
                f"lora.targets names {path}, which is a {type(layer).__name__}; expected linear layers",
                key="lora.targets",
                found=path,
                expected="names of linear layers",
            )
    names = [name for name, _ in model.named_parameters()]
    _check_patterns("lora.train", train, [*names, *(path for path, _ in model.named_modules())])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(matches(part, train) for part in prefixes(name)))
    for layer in layers.values():
        _adapt_layer(layer, rank, alpha / rank, dropout)
    return model


def _adapt_layer(layer: Any, rank: int, scale: float, dropout: float) -> None:
    kind = type(layer)
    outputs, inputs = layer.weight.shape if issubclass(kind, nn.Linear) else layer.weight.shape[::-1]
    dtype = layer.weight.dtype
    layer.lora_A = nn.Linear(inputs, rank, bias=False, dtype=dtype)
    layer.lora_B = nn.Linear(rank, outputs, bias=False, dtype=dtype)
    with torch.no_grad():
        layer.lora_B.weight.zero_()
    layer.lora_scale, layer.lora_dropout = scale, dropout
    layer.__class__ = type(f"Adapted{kind.__name__}", (_Adapted, kind), {"__module__": kind.__module__})


def is_linear(layer: nn.Module) -> bool:
    """nn.Linear, or transformers' Conv1D, whose weight is the transpose of one."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def matches(path: str, patterns: Iterable[str]) -> bool:
    """Whether some pattern fits the whole path or its end after a dot."""
    return any(fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}") for pattern in patterns)


def prefixes(name: str) -> Iterator[str]:
    """ "a.b.c" and the modules that it lies in: "a.b", "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _check_patterns(key: str, patterns: Sequence[str], names: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            last = sorted({name.rpartition(".")[2] for name in names if name})
            expected = ", ".join(name for name in last if not name.isdigit())
            raise ConfigError(
                f"{key}={pattern} names nothing in the model; it has modules called {expected}",
                key=key,
                found=pattern,
                expected=expected,
            )
