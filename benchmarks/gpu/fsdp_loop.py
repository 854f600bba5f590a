"""FSDP2 on one rank with parameters, gradients and optimizer state in host memory: torch alone.

Imports nothing of this repository. The last line printed is JSON: seconds and loss of each step, and the
bytes that the device's allocator reserved at most (on the CPU: 0).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "emulated"], default="cuda")
    parser.add_argument("--class", dest="target", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    kind = "cuda" if options.device == "cuda" else "cpu"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1")
    # tensors of both places take part: gradients on the device, norms and updates on the host
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    try:
        print(json.dumps(train(options, kind)))
    finally:
        dist.destroy_process_group()


def train(options: argparse.Namespace, kind: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = named(options.target)(named(options.config)(use_cache=False, **options.arguments)).train()
    mesh = init_device_mesh(kind, (1,))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if kind == "cuda" else OffloadPolicy(),
    }
    for block in blocks_of(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, model.config.vocab_size, (options.batch_size, options.seq_len), device=kind)
    times, losses = [], []
    for _ in range(options.steps):
        started = time.perf_counter()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_reserved() if kind == "cuda" else 0
    return {"step_times_s": times, "losses": losses, "peak_bytes": peak}


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of the longest list of modules: a transformer's blocks."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return list(max(lists, key=len))


if __name__ == "__main__":
    main()
