"""How much memory a training process holds before its first tensor.

    python -m stages.trace.profile.training_process < order.json

Run by the profile stage as a process of its own: it imports what the runtime imports (by name: no
stage's code calls another's), decodes the graph, builds its regions, starts the lanes' threads,
warms the kernels that every model uses, and prints its resident bytes.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec
import torch

from stages.artifacts import graph as g
from stages.config import OptimizerConfig
from stages.optim.kernel import CHUNK_MULTIPLE, UpdateKernel
from stages.optim.make import make_kernel
from stages.region import memory
from stages.region.interpreter import RegionFunction

#: the optimizer brings what it needs itself: some of its modules load the compiler
_PACKAGES = ("stages.process", "stages.artifacts", "stages.region", "stages.runtime")
_WORKERS = 2  # the read and write lanes
_WARM_SIDE = 256


@dataclass(frozen=True)
class Order:
    """What the process is to be ready for."""

    graph: g.RegionGraph
    optimizer: OptimizerConfig
    precision: str
    threads: int


def measure_training_process(order: Order) -> int:
    """Resident bytes of a process that could train.

    Raises:
        RuntimeError: The process failed; the message holds what it said.
    """
    pool = memory.pool_path()  # which this process's own children do not get by themselves
    finished = subprocess.run(
        [sys.executable, "-m", "stages.trace.profile.training_process"],
        env={**os.environ, **({"LD_PRELOAD": pool} if pool else {})},
        input=msgspec.json.encode(order),
        capture_output=True,
        check=False,
    )
    if finished.returncode != 0:
        said = finished.stderr.decode(errors="replace")
        raise RuntimeError(f"measuring an idle training process failed ({finished.returncode}):\n{said}")
    return int(finished.stdout.split()[-1])


def warm_up(device: torch.device | None = None) -> None:
    """Uses what every model uses, so that its threads and caches exist."""
    with torch.random.fork_rng(devices=[]):
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.randn(_WARM_SIDE, _WARM_SIDE, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.gelu(weight @ weight).sum().backward()


def import_everything(packages: tuple[str, ...]) -> None:
    """Imports `packages` and all modules under them, entry points apart."""
    for package in packages:
        root = importlib.import_module(package)
        if hasattr(root, "__path__"):
            for found in pkgutil.walk_packages(root.__path__, f"{package}."):
                if not found.name.endswith("__main__"):
                    importlib.import_module(found.name)


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES, order.threads)
    import_everything(_PACKAGES)
    torch.set_num_threads(order.threads)
    graph = order.graph
    functions = [RegionFunction(graph, region, torch.device("cpu")) for region in graph.regions]
    kernel = make_kernel(order.optimizer.name, order.optimizer, order.precision)
    warm_up()
    _update_once(kernel)
    stop = threading.Event()
    workers = [threading.Thread(target=stop.wait) for _ in range(_WORKERS)]
    for worker in workers:
        worker.start()
    gc.collect()
    memory.trim()
    resident = memory.resident_bytes()
    stop.set()
    print(len(functions), resident)


def _update_once(kernel: UpdateKernel) -> None:
    weight = torch.zeros(CHUNK_MULTIPLE)
    states = kernel.init_state("baseline", weight)
    kernel.update(weight, torch.zeros(CHUNK_MULTIPLE), states, 1, 0.0, shape=(CHUNK_MULTIPLE,))


if __name__ == "__main__":
    main()
