"""What is trained on the device, by this tool and by FSDP2, and reading what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from stages import cli
from stages.config import parse_size

ROOT = Path(__file__).resolve().parents[2]
#: more than any of these models needs whole, and less than the device has: nothing moves
_AMPLE = {"cuda": "120GB", "emulated": "8GB"}
_TINY = (
    "model.arguments.n_layer=2", "model.arguments.n_embd=64", "model.arguments.n_head=2",
    "+model.arguments.vocab_size=512", "+model.arguments.bos_token_id=0", "+model.arguments.eos_token_id=0",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model on one batch. overrides: of the model; budgets: beside the one in which nothing moves."""

    name: str
    model: str
    batch_size: int
    seq_len: int
    budgets: tuple[str, ...]
    overrides: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        sizes = [f"data.batch_size={self.batch_size}", f"data.seq_len={self.seq_len}"]
        return [f"+model={self.model}", "precision=bf16", "data=random", *sizes, *self.overrides]


_TWELVE = ("model.arguments.num_hidden_layers=12",)
#: The Llama has 12 of the 32 layers of Llama 3 8B, so that masters and moments fit into 128 GB of host memory
CASES = {
    "cuda": [
        Case("GPT-2 XL", "gpt2-xl", 4, 1024, ("24GB", "12GB")),
        Case("Llama 3 8B, 12 layers", "llama3-8b", 2, 2048, ("24GB", "12GB"), _TWELVE),
    ],
    "emulated": [Case("GPT-2, 2 layers of width 64", "gpt2", 2, 32, ("20MB",), _TINY)],
}  # fmt: skip


@dataclass
class Row:
    """One run. Seconds of the median step but the first two; bytes that the allocator reserved at most."""

    case: str
    way: str
    budget_bytes: int = 0
    step_s: float = 0.0
    predicted_s: float = 0.0
    peak_bytes: int = 0
    predicted_peak_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    failure: str = ""


def ours(case: Case, budget: str, device: str, steps: int, work: Path, seconds: float) -> Row:
    """`stages.run` on the device; budget "": everything stays there."""
    row = Row(case.name, f"this tool, {budget or 'all resident'}")
    row.budget_bytes = parse_size(budget or _AMPLE[device], "budget")
    folder = work / f"{case.model}-{budget or 'resident'}"
    line = [sys.executable, "-m", "stages.run", *case.arguments, f"device={device}", f"steps={steps}"]
    if device == "emulated":  # its memory is a part of the process, whose peak is no measure of it
        line.append("solver.replan=never")
    line += [f"budget={row.budget_bytes}", f"store={work / 'store'}", f"tiers.disk={work / 'disk'}"]
    done = _finished([*line, f"hydra.run.dir={folder}"], seconds)
    if done is None or done.returncode != 0:
        row.failure = _why(done, seconds)
        return row
    summary = json.loads((folder / "summary.json").read_text())
    row.step_s = median(summary["step_times_s"][2:])
    row.predicted_s = summary["predicted_step_time_s"]
    row.peak_bytes, row.predicted_peak_bytes = summary["peak_bytes"], summary["predicted_peak_bytes"]
    row.losses = summary["losses"]
    return row


def fsdp(case: Case, device: str, steps: int, seconds: float) -> Row:
    """FSDP2 on one rank, parameters and optimizer in host memory."""
    row = Row(case.name, "FSDP2 with CPU offload")
    model = cli.compose([*case.arguments, "budget=1TB"]).model
    line = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "fsdp_loop.py"), "--device", device]
    line += ["--class", model.target, "--config", model.config, "--arguments", json.dumps(model.arguments)]
    line += ["--batch-size", str(case.batch_size), "--seq-len", str(case.seq_len), "--steps", str(steps)]
    done = _finished(line, seconds)
    if done is None or done.returncode != 0:
        row.failure = _why(done, seconds)
        return row
    result = json.loads(done.stdout.splitlines()[-1])
    row.step_s, row.peak_bytes = median(result["step_times_s"][2:]), result["peak_bytes"]
    row.losses = result["losses"]
    return row


def _finished(line: list[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """None: it was not done in time."""
    try:
        return subprocess.run(
            line, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None


def _why(done: subprocess.CompletedProcess[str] | None, seconds: float) -> str:
    if done is None:
        return f"not done after {seconds:.0f} s"
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [f"exit code {done.returncode}"])[-1][:300]
