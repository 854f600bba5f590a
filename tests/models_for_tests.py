"""Small models, each with one difficulty that training by regions must get right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.reference import build

WIDTH = 64
VOCABULARY = 512
BATCH = 2
LENGTH = 32


@dataclass
class Scored:
    """An output that is neither a mapping nor a tuple."""

    loss: Tensor
    scores: Tensor


class Block(nn.Module):
    """Pre-norm MLP with dropout: the repeated block of most models here. [..., width] to the same."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class TokenModel(nn.Module):
    """Embeds tokens, calls `body`, scores every token and returns the mean cross entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def body(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(self.embedding(input_ids)))
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Mlp(TokenModel):
    """Three blocks and their dropout."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OddMlp(nn.Module):
    """Widths that are no multiple of a vector: 67 and 1003."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(67, 1003)
        self.second = nn.Linear(1003, 67)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        y = self.second(torch.tanh(self.first(x)))
        return functional.mse_loss(y.float(), target)


class Lstm(TokenModel):
    """A two-layer LSTM with dropout between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def body(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class CastingBatchNorm(nn.Module):
    """Batch norm whose weights are cast up: CPU kernels want them in the buffers' dtype."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        weight, bias = self.weight.float(), self.bias.float()
        return functional.batch_norm(x, self.running_mean, self.running_var, weight, bias, self.training)


class ConvBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = CastingBatchNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.convolution(x)))


class ConvBn(nn.Module):
    """Convolution and batch norm, twice: running statistics and a batch counter."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 1)
        self.blocks = nn.ModuleList(ConvBlock(channels) for _ in range(2))
        self.head = nn.Linear(channels, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(pixels.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = block(x)
        scores = self.head(x.mean((2, 3)))
        return scores, functional.cross_entropy(scores.float(), labels)


class BlockTwice(TokenModel):
    """One block called twice, another block between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.again = Block()
        self.between = Block()

    def body(self, x: Tensor) -> Tensor:
        return self.again(self.between(self.again(x)))


class ThreeWayTie(TokenModel):
    """Input embedding, output head and a projection in the middle share one weight; and a second
    tied pair beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.middle = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight
        self.middle.weight = self.embedding.weight
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.right.weight = self.left.weight

    def body(self, x: Tensor) -> Tensor:
        x = self.left(self.blocks[0](x))
        mixed = functional.softmax(self.middle(x), -1) @ self.embedding.weight
        return self.right(self.blocks[1](x + mixed))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


class StraightThrough(TokenModel):
    """Rounds forward and passes the gradient straight through backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def body(self, x: Tensor) -> Tensor:
        return self.block(_Round.apply(4 * x) / 4)


class LinearTwice(TokenModel):
    """One Linear called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def body(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class _LowRank(nn.Module):
    """A frozen Linear and a trained rank-2 correction of it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class _AdaptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.up_adapted = _LowRank(self.up)
        self.down_adapted = _LowRank(self.down)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down_adapted(functional.gelu(self.up_adapted(self.norm(x)))))


class LowRankAdapted(Mlp):
    """Everything frozen but the adapters, so that the first blocks' inputs need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks = nn.ModuleList(_AdaptedBlock() for _ in range(3))


class PartlyUsed(TokenModel):
    """A used, an unused and a frozen Linear in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        return self.frozen(torch.tanh(self.used(x)))


class Structured(nn.Module):
    """Optional and nested inputs; a dataclass as output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None, opts: dict[str, Any] = {"scale": 2}) -> Scored:  # noqa: B006
        y = self.first(x.to(self.first.weight.dtype)) * opts["scale"]
        for block in self.blocks:
            y = block(y)
        if mask is not None:
            y = y * mask.unsqueeze(-1)
        return Scored(loss=(y.float() ** 2).mean(), scores=y)


class _InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x.add_(functional.gelu(self.linear(x.clone())))


class InPlaceResidual(TokenModel):
    """Blocks that add to the residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_InPlaceBlock() for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        x = x * 1.0
        for block in self.blocks:
            x = block(x)
        return x


class _Halves(nn.Module):
    """Returns two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = self.linear(x)
        return whole[..., :WIDTH], whole.transpose(0, 1)


class ViewsAcross(TokenModel):
    """A block's outputs share storage; one is written to later and the other read after that."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = _Halves()
        self.block = Block()

    def body(self, x: Tensor) -> Tensor:
        left, turned = self.halves(x)
        y = self.block(x)
        left.mul_(3.0)
        return y + turned.transpose(0, 1)[..., :WIDTH] + turned.transpose(0, 1)[..., WIDTH:]


class LateReads(TokenModel):
    """Values of the first block are read by the last one, in between they need not be in memory; a
    plain tensor in an attribute and the transpose of a weight that are read there as well."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scales = [torch.linspace(0.5, 1.5, WIDTH)]

    def body(self, x: Tensor) -> Tensor:
        early = self.blocks[0](x)
        masks = early > 0
        for block in self.blocks[1:]:
            x = block(x)
        scale = self.scales[0].to(x.dtype)
        return self.mix(x * masks) @ self.mix.weight.T + early * scale


class Conjugated(TokenModel):
    """Complex values that are conjugated lazily, and used by a later block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        spectrum = torch.fft.rfft(x, dim=-1)
        mirrored = spectrum.conj()
        x = self.blocks[1](x)
        return x + torch.fft.irfft(mirrored * spectrum * mirrored.imag, n=WIDTH, dim=-1) / WIDTH


class Hooked(TokenModel):
    """A tensor hook doubles a gradient, which a traced program would forget."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def body(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


def tokens(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def images(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    pixels = torch.randn(rows, 3, 8, 8, generator=generator)
    return {"pixels": pixels, "labels": torch.randint(0, 10, (rows,), generator=generator)}


def vectors(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    x = torch.randn(rows, 67, generator=generator)
    return {"x": x, "target": torch.randn(rows, 67, generator=generator)}


def masked(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator)
    return {"x": x, "mask": torch.rand(rows, LENGTH, generator=generator) > 0.3}


@dataclass(frozen=True, eq=False)
class SmallModel:
    """How to build a model (see `tests.reference.build`) and what to feed it."""

    name: str
    target: str
    config: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    make_batch: Callable[[torch.Generator, int], dict[str, Tensor]] = tokens
    #: refused by the trace, with file and line, for what a trace would lose
    refused: bool = False

    def build(self) -> nn.Module:
        return build(self.target, self.config, self.arguments)

    def batches(self, count: int, *, rows: int = BATCH, seed: int = 7) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [self.make_batch(generator, rows) for _ in range(count)]


def _own(name: str, model: type[nn.Module], **changes: Any) -> SmallModel:
    return SmallModel(name, f"tests.models_for_tests.{model.__name__}", **changes)


def _huggingface(name: str, target: str, config: str, **arguments: Any) -> SmallModel:
    return SmallModel(name, f"transformers.{target}", f"transformers.{config}", arguments)


#: T2 of the cases: two layers, width 64, vocabulary 512, tied, dropout 0.1
GPT2 = _huggingface(
    "gpt2", "GPT2LMHeadModel", "GPT2Config",
    n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
LLAMA = _huggingface(
    "llama", "LlamaForCausalLM", "LlamaConfig",
    hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
)  # fmt: skip
BERT = _huggingface(
    "bert", "BertForMaskedLM", "BertConfig",
    hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=2,
    vocab_size=VOCABULARY, max_position_embeddings=LENGTH,
)  # fmt: skip
T5 = _huggingface(
    "t5", "T5ForConditionalGeneration", "T5Config",
    d_model=WIDTH, d_ff=2 * WIDTH, d_kv=16, num_heads=4, num_layers=2, num_decoder_layers=2,
    vocab_size=VOCABULARY, decoder_start_token_id=0,
)  # fmt: skip

MODELS = [
    GPT2,
    LLAMA,
    BERT,
    T5,
    _own("mlp", Mlp),
    _own("odd_mlp", OddMlp, make_batch=vectors),
    _own("lstm", Lstm),
    _own("conv_bn", ConvBn, make_batch=images),
    _own("block_twice", BlockTwice),
    _own("three_way_tie", ThreeWayTie),
    _own("linear_twice", LinearTwice),
    _own("low_rank", LowRankAdapted),
    _own("partly_used", PartlyUsed),
    _own("structured", Structured, make_batch=masked),
    _own("in_place_residual", InPlaceResidual),
    _own("views_across", ViewsAcross),
    _own("late_reads", LateReads),
    _own("conjugated", Conjugated),
    _own("straight_through", StraightThrough, refused=True),
    _own("hooked", Hooked, refused=True),
]
BY_NAME = {model.name: model for model in MODELS}
