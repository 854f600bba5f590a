"""The plain eager loop that every number is held against. Imports nothing from `stages`.

    python -m tests.reference --model gpt2 --precision fp32 --batch-size 1 --seq-len 64 \
        --steps 2 --tokens tokens.npy --export out

It keeps the whole model in memory and does nothing clever: one forward, one `backward()`, one
optimizer step. bf16 and fp16 mean that parameters (not buffers) are cast, that fp32 masters come
from the original fp32 weights, and that the optimizer works on the masters.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: how much a batch or a slice of it counts: rows, targets, ...
WeightOf = Callable[[Any], float]
#: from parameters, or from param groups
MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]
#: the param groups of trained parameters by name
MakeGroups = Callable[[Mapping[str, nn.Parameter]], list[dict[str, Any]]]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def adamw(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> MakeOptimizer:
    """AdamW in its fused implementation, whose numbers differ from those of the loop."""
    return lambda parameters: torch.optim.AdamW(
        parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True
    )


@dataclass
class LossScale:
    """The dynamic loss scale of fp16: doubles after `interval` clean steps; halves at each overflow
    from the `hysteresis`-th on, which is counted anew after each growth."""

    value: float = 2.0**16
    growth: float = 2.0
    interval: int = 1000
    backoff: float = 0.5
    hysteresis: int = 2
    minimum: float = 1.0
    maximum: float = 2.0**32
    clean_steps: int = 0
    overflows: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.clean_steps = 0
            self.overflows += 1
            if self.overflows >= self.hysteresis:
                self.value = max(self.value * self.backoff, self.minimum)
            return
        self.clean_steps += 1
        if self.clean_steps == self.interval:
            self.clean_steps = self.overflows = 0
            self.value = min(self.value * self.growth, self.maximum)


@dataclass
class Result:
    """What a run gave: tensors are copies, on the CPU."""

    losses: list[float]
    final: dict[str, Tensor]  # state dict, in the compute precision
    masters: dict[str, Tensor]  # fp32 masters, empty for fp32
    rng_states: list[Tensor]  # of the default generator, after each step
    skipped_steps: list[int] = field(default_factory=list)  # counted from 1
    #: 2-norm over all (unscaled) gradients of each step; None where the step was skipped
    norms: list[float | None] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # per step, if asked for
    learning_rates: list[list[float]] = field(default_factory=list)  # per step, of each param group
    scales: list[float] = field(default_factory=list)  # loss scale after each step of fp16


def train(
    model_factory: Callable[[], nn.Module],
    batches: Iterable[Any],
    *,
    precision: str = "fp32",
    optimizer: MakeOptimizer | None = None,
    steps: int,
    seed: int = 0,
    keep_gradients: bool = False,
    micro_batches: int = 1,
    weight_of: WeightOf | None = None,
    accumulate: int = 1,
    max_grad_norm: float = 0.0,
    skip_non_finite: bool = False,
    groups: MakeGroups | None = None,
    scheduler: MakeScheduler | None = None,
    scale: LossScale | None = None,
) -> Result:
    """Trains `steps` steps, taking the batches in turn and again from the first when they end.

    Args:
        batches: Each a mapping (keyword arguments), a sequence (positional arguments) or a tensor.
        optimizer: Makes the optimizer of the (master) parameters; fused AdamW when absent.
        keep_gradients: Also return each step's gradients as autograd left them (scaled in fp16).
        micro_batches: Slices of each batch, whose gradients `.grad` adds up one after another.
        weight_of: With which factor a slice's loss counts; its share of the rows when absent. Slices
            that do not count are left out.
        accumulate: Batches of each step: so many calls of `(loss / accumulate).backward()` before the update.
        max_grad_norm: For `clip_grad_norm_` of the unscaled gradients; 0: no clipping.
        skip_non_finite: Leave out updates from gradients with inf or nan, as fp16 does in any case.
        groups: Makes the param groups; one of all parameters when absent.
        scheduler: Its `step` follows each update that is made.
        scale: Of fp16, in its first state; the defaults when absent.
    """
    torch.manual_seed(seed)
    model = model_factory()
    masters = _cast(model, COMPUTE_DTYPES[precision])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    updated = masters or trained
    stepper = (optimizer or adamw())(groups(updated) if groups else list(updated.values()))
    schedule = scheduler(stepper) if scheduler else None
    scale = (scale or LossScale()) if precision == "fp16" else None
    result = Result(losses=[], final={}, masters={}, rng_states=[])
    batches = list(batches)
    model.train()
    torch.manual_seed(seed)
    for step in range(1, steps + 1):
        used = [batches[call % len(batches)] for call in range((step - 1) * accumulate, step * accumulate)]
        losses = [
            _accumulate(model, batch, scale, micro_batches, weight_of or rows_in, 1 / accumulate)
            for batch in used
        ]
        result.losses.append(sum(losses))
        result.learning_rates.append([group["lr"] for group in stepper.param_groups])
        if keep_gradients:
            result.gradients.append(_gradients(trained))
        norm = _update(trained, masters, stepper, scale, max_grad_norm, skip=skip_non_finite)
        result.norms.append(norm)
        result.scales.append(scale.value if scale else 1.0)
        if norm is None:
            result.skipped_steps.append(step)
        elif schedule is not None:
            schedule.step()
        result.rng_states.append(torch.get_rng_state())
    result.final = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    result.masters = {name: master.detach().clone() for name, master in masters.items()}
    return result


def rows_in(batch: Any) -> float:
    """Rows of a batch."""
    tensors = batch.values() if isinstance(batch, Mapping) else batch
    return len(next(iter(tensors)))


def _accumulate(
    model: nn.Module,
    batch: Any,
    scale: LossScale | None,
    micro_batches: int,
    weight_of: WeightOf,
    share: float,
) -> float:
    """Forward and backward of every slice in turn; the loss of the whole batch, times its share."""
    factor = (scale.value if scale else 1.0) * share
    if micro_batches == 1:
        loss = loss_of(call(model, batch))
        (loss.float() * factor if factor != 1.0 else loss).backward()
        return loss.item() * share
    total, whole = 0.0, weight_of(batch)
    for part in slices(batch, micro_batches):
        weight = weight_of(part) / whole
        if weight:
            loss = loss_of(call(model, part))
            (loss.float() * (factor * weight)).backward()
            total += weight * share * loss.item()
    return total


def slices(batch: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """`count` slices, as even as they can be, the first ones larger; empty ones left out."""
    rows = len(next(iter(batch.values())))
    sizes = [rows // count + (index < rows % count) for index in range(count)]
    parts = {name: tensor.split([size for size in sizes if size]) for name, tensor in batch.items()}
    return [dict(zip(parts, part, strict=True)) for part in zip(*parts.values(), strict=True)]


def _cast(model: nn.Module, dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Casts the parameters in place; returns fp32 masters of those that train ({} for fp32)."""
    if dtype == torch.float32:
        return {}
    masters = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.requires_grad:
            masters[name] = nn.Parameter(parameter.detach().float().clone())
        parameter.data = parameter.data.to(dtype)
    return masters


def call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, Sequence) else model(batch)


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: the output itself, its `loss`, or its first scalar tensor.

    Raises:
        TypeError: There is none.
    """
    if isinstance(output, Tensor):
        return output
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping):
        output = {entry.name: getattr(output, entry.name) for entry in dataclasses.fields(output)}
    if isinstance(output, Mapping):
        if isinstance(output.get("loss"), Tensor):
            return output["loss"]
        output = list(output.values())
    for value in output:
        if isinstance(value, Tensor) and value.dim() == 0:
            return value
    raise TypeError(f"found no scalar in an output of type {type(output).__name__}; expected a loss")


def _gradients(trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}


def _update(
    trained: dict[str, nn.Parameter],
    masters: dict[str, nn.Parameter],
    stepper: torch.optim.Optimizer,
    scale: LossScale | None,
    max_grad_norm: float,
    *,
    skip: bool,
) -> float | None:
    """One optimizer step from the gradients; their norm, or None when it was skipped for an overflow."""
    finite = not skip or all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in trained.values())
    for name, master in masters.items():
        gradient, trained[name].grad = trained[name].grad, None
        if gradient is None:
            continue
        master.grad = gradient.float() / (scale.value if scale else 1.0)
        finite = finite and (scale is None or bool(torch.isfinite(gradient).all()))
    if scale is not None:
        scale.update(overflow=not finite)
    norm = None
    if finite:
        updated = masters or trained
        gradients = [p.grad for p in updated.values() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if max_grad_norm:
            torch.nn.utils.clip_grad_norm_([p for p in updated.values() if p.grad is not None], max_grad_norm)
        stepper.step()
        with torch.no_grad():
            for name, master in masters.items():
                trained[name].copy_(master)
    stepper.zero_grad(set_to_none=True)
    return norm


def imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def build(target: str, config: str = "", arguments: Mapping[str, Any] | None = None) -> nn.Module:
    """`target(config(**arguments))`, or `target(**arguments)` without a configuration class."""
    values = dict(arguments or {})
    return imported(target)(imported(config)(**values)) if config else imported(target)(**values)


def _gpt2(layers: int, width: int, heads: int) -> tuple[str, str, dict[str, Any]]:
    sizes = {"n_layer": layers, "n_embd": width, "n_head": heads}
    return "transformers.GPT2LMHeadModel", "transformers.GPT2Config", sizes


MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "bert-base": ("transformers.BertForMaskedLM", "transformers.BertConfig", {}),
    "t5-small": ("transformers.T5ForConditionalGeneration", "transformers.T5Config", {}),
}


def token_batches(path: Path, batch_size: int, seq_len: int) -> list[dict[str, Tensor]]:
    """Batch i is rows i*B to (i+1)*B of an int64 array [rows, seq_len]; the last may be short."""
    import numpy

    rows = torch.from_numpy(numpy.load(path, allow_pickle=False))
    if rows.dtype != torch.int64 or rows.dim() != 2 or rows.shape[1] != seq_len:
        raise TypeError(f"{path}: found {rows.dtype} {list(rows.shape)}; expected int64 [rows, {seq_len}]")
    return [{"input_ids": part, "labels": part} for part in rows.split(batch_size)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.reference")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt2")
    parser.add_argument("--model-argument", action="append", default=[], metavar="NAME=JSON")
    parser.add_argument("--precision", choices=sorted(COMPUTE_DTYPES), default="fp32")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--export", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    from safetensors.torch import save_model

    options = _arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    target, config, arguments = MODELS[options.model]
    for text in options.model_argument:
        name, _, value = text.partition("=")
        arguments = {**arguments, name: json.loads(value)}
    built: list[nn.Module] = []

    def factory() -> nn.Module:
        built.append(build(target, config, arguments))
        return built[0]

    result = train(
        factory,
        token_batches(options.tokens, options.batch_size, options.seq_len),
        precision=options.precision,
        optimizer=adamw(lr=options.lr, weight_decay=options.weight_decay),
        steps=options.steps,
        seed=options.seed,
    )
    options.export.mkdir(parents=True, exist_ok=True)
    save_model(built[0], str(options.export / "model.safetensors"))
    report = {"losses": result.losses, "skipped_steps": result.skipped_steps}
    (options.export / "losses.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
