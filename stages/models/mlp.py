"""A small language model over bytes: an MLP that sees the last few bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x)), over the last dimension of size `width`."""

    def __init__(self, width: int, expansion: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, expansion * width)
        self.down = nn.Linear(expansion * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class ByteModel(nn.Module):
    """Predicts each token from the `context` tokens before it.

    Args:
        vocabulary: Number of tokens; 256 for bytes.
        width: Size of the hidden vectors.
        layers: Number of residual blocks.
        context: How many tokens the prediction sees.
    """

    def __init__(
        self, vocabulary: int = 256, width: int = 256, layers: int = 4, context: int = 8, expansion: int = 4,
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(context * width, width)
        self.blocks = nn.ModuleList(Block(width, expansion, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits [batch, seq, vocabulary], and with `labels` the mean loss of predicting each next token.

        Args:
            input_ids: int64 [batch, seq].
            labels: int64 [batch, seq], not shifted; -100 is ignored.
        """
        embedded = functional.pad(self.embedding(input_ids), (0, 0, self.context - 1, 0))
        windows = [embedded[:, first : first + input_ids.shape[1]] for first in range(self.context)]
        x = self.mix(torch.cat(windows, dim=-1))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        predicted = logits[:, :-1].reshape(-1, logits.shape[-1])
        return {"loss": functional.cross_entropy(predicted, labels[:, 1:].reshape(-1)), "logits": logits}
