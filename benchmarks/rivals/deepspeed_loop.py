"""DeepSpeed ZeRO-3 with parameters and optimizer state on disk, on the CPU; run by its own interpreter.

    DS_ACCELERATOR=cpu LD_PRELOAD=... PYTHON_WITH_DEEPSPEED deepspeed_loop.py --nvme FOLDER

Imports nothing of this repository. The last line printed is JSON, as of benchmarks/rivals/loops.py. Settings
of the asynchronous reads and writes: the best of three that were tried.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import deepspeed  # pyright: ignore[reportMissingImports]
import torch
from transformers import GPT2Config, GPT2LMHeadModel

_AIO = {
    "block_size": 8 << 20,
    "queue_depth": 8,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}


def configuration(options: argparse.Namespace, largest_elements: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": options.nvme, "pin_memory": False}
    return {
        "train_batch_size": options.batch_size,
        "train_micro_batch_size_per_gpu": options.batch_size // options.micro_batches,
        "gradient_accumulation_steps": options.micro_batches,
        "bf16": {"enabled": options.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": options.sub_group_elements,
            "offload_param": {**nvme, "buffer_count": 5, "buffer_size": largest_elements},
            # its pipelined reads and writes stop with an assertion
            "offload_optimizer": {**nvme, "buffer_count": 4},
        },
        "aio": _AIO,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def initialise(model: GPT2LMHeadModel, seed: int) -> None:
    """Values like GPT-2's, one gathered parameter at a time: partitioned construction skips its own."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)


def train(options: argparse.Namespace) -> dict[str, object]:
    deepspeed.init_distributed(dist_backend="gloo")
    sizes = json.loads(options.model)
    config = GPT2Config(use_cache=False, **sizes)
    settings = configuration(options, -(-config.vocab_size * config.n_embd // 4096) * 4096)
    # no dtype here: a fault of precedence would turn fp32 into bf16
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT2LMHeadModel(config)
    model.tie_weights()
    initialise(model, options.seed)
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    generator = torch.Generator().manual_seed(options.seed)
    times, losses = [], []
    for _ in range(options.steps):
        tokens = torch.randint(config.vocab_size, (options.batch_size, options.seq_len), generator=generator)
        started = time.perf_counter()
        losses.append(_step(engine, tokens, options.micro_batches))
        times.append(time.perf_counter() - started)
    return {"step_times_s": times, "losses": losses, "peak_bytes": peak_bytes()}


def _step(engine: Any, tokens: torch.Tensor, micro_batches: int) -> float:
    total = 0.0
    for part in tokens.chunk(micro_batches):
        loss = engine(input_ids=part, labels=part).loss
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / micro_batches
    return total


def peak_bytes() -> int:
    """The largest resident memory (VmHWM) of this process, interpreter included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", required=True, help="folder for parameters and optimizer state")
    parser.add_argument("--model", default="{}", help="arguments of GPT2Config, as JSON")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--sub-group-elements", type=int, default=10**9)
    options = parser.parse_args()
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    print(json.dumps(train(options)), flush=True)


if __name__ == "__main__":
    main()
