"""Who runs: each way to train as a command, an environment and, where it has one, a memory limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rivals.workload import Allocator, Workload

_LOOPS = "benchmarks.rivals.loops"
#: positions whose logits the hand-tuned loop makes at once
_CHUNK_ROWS = 512
_HAND_TUNED = ("--fused", "--checkpoint", "--in-backward", "--chunk-rows", str(_CHUNK_ROWS))

#: (workload, work folder, steps) -> command
MakeCommand = Callable[[Workload, Path, int], list[str]]


@dataclass(frozen=True)
class Contender:
    """One way to train.

    what: How, for the table. in_memory: It keeps everything in memory, and competes for the best that does.
    """

    name: str
    what: str
    command: MakeCommand
    environment: Mapping[str, str] = field(default_factory=dict)
    in_memory: bool = False


def _loop(*flags: str) -> MakeCommand:
    def command(workload: Workload, work: Path, steps: int) -> list[str]:
        return [sys.executable, "-m", _LOOPS, *workload.loop_arguments(steps), *flags]

    return command


def _mapped(workload: Workload, work: Path, steps: int) -> list[str]:
    return [*_loop(*_HAND_TUNED)(workload, work, steps), "--mapped", str(work / "scratch" / "mapped")]


def loops(allocator: Allocator) -> list[Contender]:
    """The plain torch loops."""
    keeping = {"LD_PRELOAD": str(allocator.library)}
    kept = f"under {allocator.name}"
    tuned = "checkpointing, optimizer in backward, chunked cross-entropy"
    return [
        Contender("eager", "plain eager: autocast over fp32 weights, AdamW", _loop(), in_memory=True),
        Contender("checkpointing", "eager, activation checkpointing", _loop("--checkpoint")),
        Contender("fused", f"eager, fused AdamW, {kept}", _loop("--fused"), keeping, in_memory=True),
        Contender(
            "masters", f"the same, weights in bf16 with fp32 masters, {kept}",
            _loop("--fused", "--masters"), keeping, in_memory=True,
        ),
        Contender(
            "masters-in-backward", f"the same, updated in backward, {kept}",
            _loop("--fused", "--masters", "--in-backward"), keeping, in_memory=True,
        ),
        Contender("hand-tuned", f"{tuned}, fused, {kept}", _loop(*_HAND_TUNED), keeping),
        Contender("mapped", f"the same, parameters and moments in mapped files, {kept}", _mapped, keeping),
    ]  # fmt: skip


def deepspeed(interpreter: str, allocator: Allocator) -> Contender:
    """DeepSpeed by its own Python, whose folder has the tools that its first start compiles with."""
    path = f"{Path(interpreter).absolute().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {"DS_ACCELERATOR": "cpu", "LD_PRELOAD": str(allocator.library), "PATH": path}

    def command(workload: Workload, work: Path, steps: int) -> list[str]:
        script = Path(__file__).parent / "deepspeed_loop.py"
        arguments = workload.loop_arguments(steps)
        return [interpreter, str(script), *arguments, "--nvme", str(work / "scratch" / "deepspeed")]

    what = f"DeepSpeed ZeRO-3, parameters and optimizer on disk, under {allocator.name}"
    return Contender("deepspeed", what, command, environment)


def ours(name: str, budget_bytes: int, settings: tuple[str, ...] = ()) -> Contender:
    """This tool under a budget; its run folder is `run_folder(work, name)`."""

    def command(workload: Workload, work: Path, steps: int) -> list[str]:
        return our_command("stages.run", workload, work, name, budget_bytes, steps, settings)

    cut = "".join(f", {setting}" for setting in settings)
    return Contender(name, f"stages.run, budget {budget_bytes / 1e6:.0f} MB{cut}", command)


def our_command(
    module: str,
    workload: Workload,
    work: Path,
    name: str,
    budget_bytes: int,
    steps: int,
    settings: tuple[str, ...] = (),
) -> list[str]:
    """A command of ours with the comparison's own store, so that traces and profiles are made once."""
    folders = [
        f"hydra.run.dir={run_folder(work, name)}",
        f"store={work / 'store'}",
        f"tiers.disk={work / 'disk'}",
    ]
    size = [f"budget={budget_bytes}", f"steps={steps}"]
    return [sys.executable, "-m", module, *workload.arguments, *size, *settings, *folders]


def run_folder(work: Path, name: str) -> Path:
    """Where a run of ours leaves its results; a name without what a command line would have to quote."""
    return work / "runs" / name.replace(" ", "-").replace("'", "")
