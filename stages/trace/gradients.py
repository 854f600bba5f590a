"""Gradients written in Python, which an exported graph would silently lose.

`torch.export` sees the forward of an `autograd.Function` but not its backward, and no hook. So all
of them are intercepted while tracing, and refused with module, file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from stages.artifacts.errors import TraceError
from stages.trace.places import user_module, user_place

_ADVICE = (
    "its gradient is computed in Python and would be lost in a traced graph. "
    "Expected PyTorch operators only; replace it by differentiable operators"
)


@contextmanager
def refused(model: nn.Module) -> Iterator[None]:
    """While inside, custom gradients that the model would use raise TraceError."""
    check_hooks(model)
    with ExitStack() as stack:
        function = torch.autograd.Function
        stack.enter_context(mock.patch.object(function, "apply", classmethod(_apply(function.apply, model))))
        for owner, name in _HOOKS:
            stack.enter_context(mock.patch.object(owner, name, _refusal(name, model)))
        yield
    check_hooks(model)


_HOOKS: list[tuple[Any, str]] = [
    (torch.Tensor, "register_hook"),
    (torch.Tensor, "register_post_accumulate_grad_hook"),
    (torch.autograd.graph, "register_multi_grad_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
    (nn.Module, "register_backward_hook"),
]


def _apply(original: Any, model: nn.Module) -> Callable[..., Any]:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        needs = torch.is_grad_enabled() and any(
            isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values())
        )
        if needs:
            raise TraceError(
                f"{user_place()}: module {user_module(model)!r} uses the autograd function "
                f"{cls.__module__}.{cls.__qualname__}; {_ADVICE}",
                found=cls.__qualname__,
                expected="differentiable PyTorch operators",
            )
        return original.__func__(cls, *args, **kwargs)

    return apply


def _refusal(name: str, model: nn.Module) -> Callable[..., Any]:
    def register(*_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{user_place()}: module {user_module(model)!r} calls {name}; {_ADVICE}",
            found=name,
            expected="differentiable PyTorch operators",
        )

    return register


def check_hooks(model: nn.Module) -> None:
    """Refuses hooks that are registered on modules or parameters.

    Raises:
        TraceError: One is; the message names its module, file and line.
    """
    for hook in (
        *torch_module._global_backward_hooks.values(),
        *torch_module._global_backward_pre_hooks.values(),
    ):
        raise TraceError(f"a global module backward hook ({_where(hook)}) is registered; {_ADVICE}")
    for name, module in model.named_modules():
        for hook in (*module._backward_hooks.values(), *module._backward_pre_hooks.values()):
            kind = type(module).__name__
            raise TraceError(f"module {name or kind!r} has a backward hook ({_where(hook)}); {_ADVICE}")
    for name, tensor in model.named_parameters():
        for hooks in (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)):
            for hook in (hooks or {}).values():
                raise TraceError(f"parameter {name!r} has a gradient hook ({_where(hook)}); {_ADVICE}")


def _where(hook: Any) -> str:
    function = getattr(hook, "__func__", getattr(hook, "func", hook))
    code = getattr(function, "__code__", None)
    return repr(hook) if code is None else f"{code.co_filename}:{code.co_firstlineno}"
