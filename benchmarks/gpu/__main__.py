"""One CUDA device: parity, peaks against budgets, step times against all-resident and against FSDP2.

    python -m benchmarks.gpu                     # under ten minutes
    python -m benchmarks.gpu --device emulated   # the same with a tiny model and no device, to try it out

Parity first (`pytest -m gpu`: bitwise against the plain loop on the device), then each model under its
budgets. Every row is written as soon as it is there: a run that is cut off keeps what it has measured. Exit
code 1 if parity fails, or a peak is above its budget. Results: benchmarks/results/gpu.md and .json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.cases import CASES, ROOT, Row, fsdp, ours

RESULTS = ROOT / "benchmarks" / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=list(CASES), default="cuda")
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first two do not count")
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of it")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--no-parity", action="store_true")
    options = parser.parse_args(arguments)
    if options.steps < 3:
        parser.error("--steps must be at least 3: the first two do not count")
    deadline = time.monotonic() + options.seconds
    parity = "not run" if options.no_parity else _parity(options.device, options.seconds / 3)
    print(f"parity: {parity}", flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="stages-gpu-") as work:
        for run in _runs(options, Path(work)):
            left = deadline - time.monotonic()
            if left < 5:
                print("out of time", flush=True)
                break
            rows.append(run(left))
            print(_line(rows[-1]), flush=True)
            _write(rows, parity, options)
    over = [row for row in rows if row.budget_bytes and row.peak_bytes > row.budget_bytes]
    failed = parity not in ("passed", "not run") or (options.device == "cuda" and bool(over))
    return 1 if failed else 0


def _runs(options: argparse.Namespace, work: Path) -> Iterator[Callable[[float], Row]]:
    """Budgets before rivals, the first model before the second."""
    for case in CASES[options.device]:
        for budget in ("", *case.budgets):
            yield lambda left, case=case, budget=budget: ours(
                case, budget, options.device, options.steps, work, left
            )
        yield lambda left, case=case: fsdp(case, options.device, options.steps, left)


def _parity(device: str, seconds: float) -> str:
    """Of small models on the device; of the emulated one it is what the other tests hold."""
    if device != "cuda":
        return "not run"
    line = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/parity/test_cuda.py"]
    try:
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    return "passed" if done.returncode == 0 else f"failed: {done.stdout.strip().splitlines()[-1]}"


def _line(row: Row) -> str:
    if row.failure:
        return f"{row.case}, {row.way}: {row.failure}"
    return (
        f"{row.case}, {row.way}: {row.step_s:.3f} s (predicted {row.predicted_s:.3f}), "
        f"peak {row.peak_bytes / 1e9:.2f} GB (predicted {row.predicted_peak_bytes / 1e9:.2f})"
    )


def _write(rows: Sequence[Row], parity: str, options: argparse.Namespace) -> None:
    options.results.mkdir(parents=True, exist_ok=True)
    name = "gpu" if options.device == "cuda" else f"gpu-{options.device}"
    record = {"parity": parity, "rows": [asdict(row) for row in rows]}
    (options.results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    lines = [
        f"# One {_device(options.device)}",
        "",
        f"`python -m benchmarks.gpu`, bf16 with fp32 masters. Parity of small models: {parity}.",
        "",
        "| model, batch | way | budget GB | peak GB | predicted | step s | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    sizes = {case.name: f"{case.batch_size}x{case.seq_len}" for case in CASES[options.device]}
    for row in rows:
        budget = f"{row.budget_bytes / 1e9:.2f}" if row.budget_bytes else ""
        figures = [f"{row.peak_bytes / 1e9:.2f}", f"{row.predicted_peak_bytes / 1e9:.2f}"]
        figures += [f"{row.step_s:.3f}", f"{row.predicted_s:.3f}"]
        cells = [row.failure, "", "", ""] if row.failure else figures
        lines.append(f"| {row.case}, {sizes[row.case]} | {row.way} | {budget} | {' | '.join(cells)} |")
    (options.results / f"{name}.md").write_text("\n".join(lines) + "\n")


def _device(device: str) -> str:
    if device != "cuda":
        return "emulated accelerator"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
