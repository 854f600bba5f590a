"""Whole training runs side by side: this tool under four budgets, and what others do on the same machine.

    python -m benchmarks.rivals                        # GPT-2 124M, bf16, 4x512: about 25 minutes
    python -m benchmarks.rivals --quick                # a small model, to try it out; nothing is written
    python -m benchmarks.rivals --dropout              # with the model's dropout (results: rivals-dropout)
    python -m benchmarks.rivals --resume               # goes on where it was interrupted
    python -m benchmarks.rivals --deepspeed-python VENV/bin/python   # with DeepSpeed, and its smallest limit
    python -m benchmarks.rivals --limits eager fused hand-tuned mapped   # the smallest cgroup of each: long
    python -m benchmarks.rivals --size                 # cost against size: gpt2 to gpt2-xl at 1500 MB
    python -m benchmarks.rivals --xl                   # gpt2-xl alone

Every contender is a process of its own; all run in turn before any is repeated, and the first step of each
does not count. M is the peak of plain eager. DeepSpeed is optional, in a virtual environment of its own:
`DS_BUILD_OPS=0 pip install deepspeed ninja torch transformers`, and libaio's headers from the system. Memory
cgroups need root and cgroup v1. Exit code 1 if a criterion that was measured is missed. Results:
benchmarks/results/rivals.json and .md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.rivals import checks, record, sizes, table
from benchmarks.rivals.comparison import Setting, compare, search_limits
from benchmarks.rivals.record import Record
from benchmarks.rivals.workload import ROOT, Workload, has_deepspeed, page_keeping_allocator
from stages.config import parse_size

#: under dropout torch's attention on the CPU keeps the matrix of all pairs, and M grows by half
_NO_DROPOUT = tuple(f"+model.arguments.{name}_pdrop=0.0" for name in ("attn", "resid", "embd"))
_QUICK = (
    "model.arguments.n_layer=2", "model.arguments.n_embd=64", "model.arguments.n_head=2",
    "+model.arguments.vocab_size=2048", "+model.arguments.bos_token_id=0", "+model.arguments.eos_token_id=0",
)  # fmt: skip
_QUICK_SHARES = (1.5, 1.2, 1.1)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    setting = _setting(options)
    found = record.load(setting.record_path, setting.workload.name)
    if options.size or options.xl:
        _measure_sizes(options, setting, found)
    else:
        if not options.resume:
            found.runs, found.limits, found.bounds = [], [], {}
        if options.deepspeed_limit:
            found.limits = [
                record.Limit("deepspeed", parse_size(options.deepspeed_limit, "--deepspeed-limit"))
            ]
        elif setting.deepspeed_python:
            search_limits(setting, found, ["deepspeed"])
        compare(setting, found, options.repeats)
        search_limits(setting, found, options.limits)
    judged = judge(found, setting.shares)
    _show(found, judged, setting.console)
    if not options.quick:
        _write(found, judged, options.results, "rivals-dropout" if options.dropout else "rivals")
    return 1 if any(check.met is False for check in judged) else 0


def judge(found: Record, shares: tuple[float, float, float] = checks.SHARES) -> list[checks.Check]:
    """Every criterion that the record has something about."""
    in_memory = ["fused", "masters", "masters-in-backward"]
    rows = checks.rows_of(found.runs)
    judged = checks.checks_of(rows, found.bounds, in_memory, shares) if rows else []
    return judged + (sizes.checks_of(found.sizes) if found.sizes else [])


def _measure_sizes(options: argparse.Namespace, setting: Setting, found: Record) -> None:
    models = sizes.MODELS if options.size else sizes.MODELS[-1:]
    found.sizes = [item for item in found.sizes if options.resume or item.model not in models]
    budget = parse_size(options.size_budget, "--size-budget")
    for model in models:
        if any(item.model == model for item in found.sizes):
            continue
        item = sizes.measure(model, options.precision, budget, options.size_steps, setting.work)
        found.sizes.append(item)
        setting.console.print(f"{model}: {item.run.failure or item.run.step_times_s}", highlight=False)
        record.save(found, setting.record_path)


def _setting(options: argparse.Namespace) -> Setting:
    console = Console(width=200)
    overrides = tuple(options.overrides) or (_QUICK if options.quick else ())
    overrides += () if options.dropout else _NO_DROPOUT
    workload = Workload(options.model, options.precision, options.batch_size, options.seq_len, overrides)
    allocator = page_keeping_allocator(options.allocator)
    console.print(f"{workload.name}; page-keeping allocator: {allocator.name}", highlight=False)
    installed = has_deepspeed(options.deepspeed_python)
    if not installed:
        console.print("DeepSpeed: not installed (--deepspeed-python)")
    interpreter = options.deepspeed_python if installed else ""
    # a small model is smaller than the libraries that train it
    shares = _QUICK_SHARES if options.quick else checks.SHARES
    return Setting(workload, allocator, options.work, options.steps, interpreter, shares, console)


def _show(found: Record, judged: Sequence[checks.Check], console: Console) -> None:
    if found.runs:
        console.print(table.as_table("Runs", table.ROW_COLUMNS, table.row_cells(found)))
    if found.sizes:
        console.print(table.as_table("Sizes", table.SIZE_COLUMNS, table.size_cells(found.sizes)))
    console.print(table.as_table("Checks", table.CHECK_COLUMNS, table.check_cells(judged)))


def _write(found: Record, judged: Sequence[checks.Check], folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "record": found,
        "checks": [{**msgspec.structs.asdict(check), "met": check.met} for check in judged],
    }
    (folder / f"{name}.json").write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    commands = ["python -m benchmarks.rivals"] if found.runs else []
    commands += ["python -m benchmarks.rivals --size"] if found.sizes else []
    (folder / f"{name}.md").write_text(table.as_markdown(found, judged, commands))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rivals",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="gpt2", help="a GPT-2 of conf/model")
    parser.add_argument(
        "--overrides", nargs="+", default=[], help="of the model, as on this tool's command line"
    )
    parser.add_argument("--dropout", action="store_true", help="as the model's file has it; default: none")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--seq-len", type=int, default=None)
    parser.add_argument("--steps", type=int, default=6, help="of each run, the first of which does not count")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--quick", action="store_true", help="a small model, nothing is written to the results"
    )
    parser.add_argument("--resume", action="store_true", help="keep the runs that are there")
    parser.add_argument(
        "--allocator", default="", help="library that keeps freed pages; default: tcmalloc, else ours"
    )
    parser.add_argument("--deepspeed-python", default="", help="a Python that has DeepSpeed")
    parser.add_argument(
        "--deepspeed-limit", default="", help="its smallest memory limit, where that is known"
    )
    parser.add_argument(
        "--limits", nargs="+", default=[], metavar="NAME", help="search their smallest cgroups"
    )
    parser.add_argument("--size", action="store_true", help="cost against size instead")
    parser.add_argument("--xl", action="store_true", help="gpt2-xl instead")
    parser.add_argument("--size-budget", default="1500MB")
    parser.add_argument("--size-steps", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "outputs" / "rivals", help="scratch folder")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    if min(options.steps, options.size_steps) < 2:
        parser.error("at least 2 steps: the first step does not count")
    options.batch_size = options.batch_size or (2 if options.quick else 4)
    options.seq_len = options.seq_len or (64 if options.quick else 512)
    options.work = options.work.absolute() / ("dropout" if options.dropout else "plain")
    options.work.mkdir(parents=True, exist_ok=True)
    return options


if __name__ == "__main__":
    sys.exit(main())
