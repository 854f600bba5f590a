"""The training loops that this tool is held against, as somebody without it would write them.

    python -m benchmarks.rivals.loops --fused --steps 6

Plain torch; nothing here imports the tool. The last line printed is JSON: seconds of each step, loss of each
step, and the process's largest resident memory. GPT-2 on random tokens, in training mode, AdamW with torch's
defaults (which are the tool's too).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.rivals.chunked_loss import cross_entropy_in_chunks
from benchmarks.rivals.mapped import MappedTensors

Step = Callable[[], None]


def peak_bytes() -> int:
    """The largest resident memory (VmHWM) of this process, interpreter included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def make_model(options: argparse.Namespace) -> GPT2LMHeadModel:
    torch.manual_seed(options.seed)
    model = GPT2LMHeadModel(GPT2Config(use_cache=False, **json.loads(options.model)))
    if options.checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.bfloat16().train() if options.masters else model.train()


def loss_of(model: GPT2LMHeadModel, tokens: torch.Tensor, chunk_rows: int) -> torch.Tensor:
    """The model's own loss, or the same without all logits at once.

    Args:
        tokens: int64 [batch, sequence].
        chunk_rows: Positions whose logits are made at once; 0: all.
    """
    if not chunk_rows:
        return model(input_ids=tokens, labels=tokens).loss
    hidden = model.transformer(input_ids=tokens).last_hidden_state
    return cross_entropy_in_chunks(hidden[:, :-1], model.lm_head.weight, tokens[:, 1:], chunk_rows)


def optimizer_over(
    parameters: list[torch.Tensor], options: argparse.Namespace, mapped: MappedTensors | None
) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, fused=options.fused or None)
    if mapped is not None:
        for parameter in parameters:
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": mapped.zeros_like(parameter),
                "exp_avg_sq": mapped.zeros_like(parameter),
            }
    return optimizer


def update_of(
    parameters: list[torch.nn.Parameter], options: argparse.Namespace, mapped: MappedTensors | None
) -> Step:
    """A function that updates these parameters from their gradients, and drops those."""
    if not options.masters:
        optimizer = optimizer_over(list(parameters), options, mapped)

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update
    masters = [_master_of(parameter, mapped) for parameter in parameters]
    optimizer = optimizer_over(masters, options, mapped)

    @torch.no_grad()
    def update_masters() -> None:
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None, "every parameter of the model gets a gradient"
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master)

    return update_masters


def _master_of(parameter: torch.nn.Parameter, mapped: MappedTensors | None) -> torch.Tensor:
    whole = parameter.detach().float()
    return whole if mapped is None else mapped.like(whole)


def prepare_updates(
    model: GPT2LMHeadModel, options: argparse.Namespace, mapped: MappedTensors | None
) -> Step:
    """What to call after backward; with `--in-backward` each gradient is used as soon as it is there."""
    parameters = list(model.parameters())
    if not options.in_backward:
        return update_of(parameters, options, mapped)
    for parameter in parameters:
        update = update_of([parameter], options, mapped)
        parameter.register_post_accumulate_grad_hook(lambda _, update=update: update())
    return lambda: None


def train(options: argparse.Namespace) -> dict[str, object]:
    """Trains; seconds and loss of each step."""
    mapped = MappedTensors(Path(options.mapped)) if options.mapped else None
    model = make_model(options)
    if mapped is not None:
        for parameter in model.parameters():
            parameter.data = mapped.like(parameter.data)
    after_backward = prepare_updates(model, options, mapped)
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    times, losses = [], []
    for _ in range(options.steps):
        shape = (options.batch_size, options.seq_len)
        tokens = torch.randint(model.config.vocab_size, shape, generator=generator)
        started = time.perf_counter()
        with _autocast(options):
            loss = loss_of(model, tokens, options.chunk_rows)
        loss.backward()
        after_backward()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - started)
        del loss
    return {"step_times_s": times, "losses": losses, "peak_bytes": peak_bytes()}


def _autocast(options: argparse.Namespace) -> AbstractContextManager[object]:
    if options.precision == "bf16" and not options.masters:
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals.loops", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default="{}", help="arguments of GPT2Config, as JSON")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16", help="bf16: autocast")
    parser.add_argument("--masters", action="store_true", help="weights in bf16, updated through fp32 copies")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    parser.add_argument("--checkpoint", action="store_true", help="activations of each block recomputed")
    parser.add_argument(
        "--in-backward", action="store_true", help="each gradient used as soon as it is there"
    )
    parser.add_argument("--chunk-rows", type=int, default=0, help="positions whose logits are made at once")
    parser.add_argument("--mapped", default="", help="folder: parameters and moments in mapped files there")
    return parser.parse_args(arguments)


def main() -> None:
    print(json.dumps(train(options_of())), flush=True)


if __name__ == "__main__":
    main()
