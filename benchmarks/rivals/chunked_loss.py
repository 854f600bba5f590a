"""Cross-entropy over a large vocabulary without all logits at once."""

from __future__ import annotations

from typing import Any

import torch


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes gradients together with the loss, so that logits of a chunk are made once and dropped.

    The gradient of mean cross-entropy by the logits is (softmax - one-hot) / rows.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int
    ) -> torch.Tensor:
        low = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=torch.float32)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), rows):
            part, wanted = hidden[start : start + rows], targets[start : start + rows, None]
            logits = (part @ low.t()).float()
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            loss += (normaliser - logits.gather(1, wanted)).sum()
            gradient = logits.sub_(normaliser).exp_()
            gradient.scatter_add_(1, wanted, torch.full_like(wanted, -1.0, dtype=torch.float32))
            gradient = gradient.div_(len(hidden)).to(hidden.dtype)
            del logits, normaliser
            torch.mm(gradient, low, out=hidden_gradient[start : start + rows])
            weight_gradient += gradient.t() @ part
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, *received: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # the loss is the last thing computed: what it receives is one
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient, weight_gradient, None, None


def cross_entropy_in_chunks(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, rows: int
) -> torch.Tensor:
    """Mean cross-entropy of `hidden @ weight.T`; must be the last operation before backward.

    Args:
        hidden: [batch, positions, width].
        weight: [vocabulary, width].
        targets: int64 [batch, positions].
        rows: Positions whose logits exist at once.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    if torch.is_autocast_enabled("cpu"):
        flat = flat.to(torch.get_autocast_dtype("cpu"))
    with torch.autocast("cpu", enabled=False):
        return _ChunkedCrossEntropy.apply(flat, weight, targets.reshape(-1), rows)
