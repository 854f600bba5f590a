"""The comparison with rivals judges what it is given, and its loops train alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks.rivals import __main__ as rivals
from benchmarks.rivals import comparison, loops, record, sizes, table
from benchmarks.rivals.bounds import Bound, time_of_both
from benchmarks.rivals.checks import AT_DEEPSPEED, DEEPSPEED_LIMITED, Check, checks_of, rows_of
from benchmarks.rivals.chunked_loss import cross_entropy_in_chunks
from benchmarks.rivals.contenders import Contender
from benchmarks.rivals.limits import smallest
from benchmarks.rivals.running import Run, run_once
from benchmarks.rivals.workload import ROOT, Workload, page_keeping_allocator
from stages.artifacts.costs import LinkCost

IN_MEMORY = ["fused", "masters"]
#: contender -> seconds of a step, every criterion is just met
FAST = {
    "eager": 3.0,
    "fused": 2.4,
    "masters": 2.0,
    "hand-tuned": 3.31,
    "mapped": 8.01,
    DEEPSPEED_LIMITED: 4.51,
    "ours at 1 M": 2.1,
    "ours at 0.5 M": 3.0,
    "ours at 0.28 M": 4.0,
    AT_DEEPSPEED: 3.0,
}
TINY = '{"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 0}'


def runs_with(**changed: float) -> list[Run]:
    times = {**FAST, **{name.replace("_", " "): value for name, value in changed.items()}}
    return [run_of(name, [9.0, step_s, step_s]) for name, step_s in times.items()]


def run_of(name: str, times: list[float], **fields: object) -> Run:
    run = Run(name, 0, step_times_s=times, peak_bytes=900, others_share=0.01)
    if name.startswith("ours"):
        run = msgspec.structs.replace(run, budget_bytes=1000, least_feasible_bytes=400)
    if name == DEEPSPEED_LIMITED:
        run = msgspec.structs.replace(run, limit_bytes=1000)
    return msgspec.structs.replace(run, **fields)


def judged(runs: list[Run], bounds: dict[str, Bound] | None = None) -> list[Check]:
    return checks_of(rows_of(runs), bounds or {}, IN_MEMORY)


def missed(checks: list[Check]) -> list[str]:
    return [check.what for check in checks if check.met is False]


def test_every_criterion_is_met_at_its_limit() -> None:
    checks = judged(runs_with())
    assert all(check.met for check in checks), missed(checks)
    assert len(checks) == 12


@pytest.mark.parametrize(
    ("name", "step_s", "against"),
    [
        ("ours at 1 M", 2.2, ["masters"]),
        ("eager", 2.4, ["eager", "eager", "eager"]),
        ("ours at 0.5 M", 3.05, ["hand-tuned", "eager"]),
        ("mapped", 7.9, ["mapped"]),
        (DEEPSPEED_LIMITED, 4.4, [DEEPSPEED_LIMITED]),
    ],
)
def test_a_ratio_that_is_too_small_is_a_miss(name: str, step_s: float, against: list[str]) -> None:
    found = missed(
        judged([run for run in runs_with() if run.contender != name] + [run_of(name, [9.0, step_s])])
    )
    assert [what.partition(" / ")[2] for what in found] == against


def test_the_best_of_those_in_memory_is_the_measure() -> None:
    first = judged(runs_with())[0]
    assert first.what.endswith("/ masters")
    assert first.got == pytest.approx(2.0 / 2.1)


def test_what_others_lack_is_not_measured_and_what_we_lack_is_a_miss() -> None:
    without = [run for run in runs_with() if "eep" not in run.contender]
    assert not missed(judged(without))
    assert sum(check.met is None for check in judged(without)) == 2
    refused = [run for run in runs_with() if run.contender != "ours at 1 M"]
    refused.append(Run("ours at 1 M", 0, failure="exit code 2: error: too small"))
    assert missed(judged(refused)) == [
        "ours at 1 M: throughput / fused or masters",
        "ours at 1 M: throughput / eager",
        "ours at 1 M: peak / budget",
    ]


def test_one_failure_among_repeats_counts() -> None:
    runs = [*runs_with(), Run("mapped", 1, failure="killed: out of memory")]
    check = next(check for check in judged(runs) if check.what.endswith("mapped"))
    assert check.met is None
    assert "killed" in check.note


def test_peaks_over_the_budget_and_steps_over_the_bound_are_misses() -> None:
    name = "ours at 0.28 M"
    runs = [run for run in runs_with() if run.contender != name]
    runs.append(run_of(name, [9.0, 4.0], peak_bytes=1001))
    slow = Bound(compute_s=3.0, read_s=1.0, write_s=0.5, disk_s=1.2)
    assert missed(judged(runs, {name: slow})) == [
        f"{name}: step / max(compute, bytes per link / bandwidth)",
        f"{name}: peak / budget",
    ]
    assert not missed(judged(runs_with(), {name: Bound(2.0, 3.5, 0.5, 3.6)}))


def test_repeats_make_one_row_without_first_steps() -> None:
    rows = rows_of([run_of("eager", [9.0, 1.0, 1.2]), run_of("eager", [8.0, 1.4, 1.6], repeat=1)])
    assert rows["eager"].step_times_s == [1.0, 1.2, 1.4, 1.6]
    assert rows["eager"].step_s == pytest.approx(1.3)


def test_a_disk_takes_for_both_directions_what_was_measured_together_or_in_turn() -> None:
    read = LinkCost("disk_read", 0, 200, 100)
    write = LinkCost("disk_write", 0, 200, 100)
    assert time_of_both(400, 0, read, write) == pytest.approx(2.0)
    assert time_of_both(400, 400, read, write) == pytest.approx(4.0)
    assert time_of_both(400, 200, read, write) == pytest.approx(3.0)
    # contention that costs more than turns
    slow = LinkCost("disk_write", 0, 200, 10)
    assert time_of_both(400, 400, read, slow) == pytest.approx(4.0)


def test_the_smallest_limit_is_found_with_few_runs() -> None:
    tried: list[int] = []

    def survives(limit: int) -> bool:
        tried.append(limit)
        return limit >= 37

    assert smallest(survives, 100, grain_bytes=1) == 37
    assert len(tried) <= 8
    assert smallest(lambda limit: False, 100, grain_bytes=1) is None


def test_sizes_are_compared_where_they_stream() -> None:
    def sized(model: str, step_s: float, read_bytes: int, planning_s: float = 1.0) -> sizes.Sized:
        bound = Bound(0.5, step_s / 1.1, 0.1, step_s / 1.1)
        run = run_of(f"ours {model}", [9.0, step_s])
        return sizes.Sized(model, run, 1000, read_bytes, planning_s, bound)

    small, medium = sized("gpt2", 1.0, 100), sized("gpt2-medium", 2.0, 12000)
    assert not missed(sizes.checks_of([small, medium, sized("gpt2-xl", 2.6, 12000)]))
    assert len(missed(sizes.checks_of([medium, sized("gpt2-xl", 2.7, 12000)]))) == 1
    assert missed(sizes.checks_of([sized("gpt2", 1.0, 12000, planning_s=16.0)])) == [
        "gpt2: seconds of planning"
    ]


def test_the_page_has_a_line_for_each_run_and_check_and_no_path() -> None:
    found = record.Record("gpt2", runs=runs_with())
    checks = rivals.judge(found)
    page = table.as_markdown(found, checks, ["python -m benchmarks.rivals"])
    assert sum(line.startswith("| ") for line in page.splitlines()) == len(checks) + len(FAST) + 2
    assert str(Path.home()) not in page


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_chunked_loss_gives_the_gradients_of_the_whole_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 7, 8, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 8, dtype=dtype, requires_grad=True)
    targets = torch.randint(11, (2, 7))
    whole = torch.nn.functional.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())
    expected = torch.autograd.grad(whole, (hidden, weight))
    parts = cross_entropy_in_chunks(hidden, weight, targets, rows=4)
    torch.testing.assert_close(parts.double(), whole.double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.autograd.grad(parts, (hidden, weight)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "flags",
    [
        ["--fused"],
        ["--checkpoint"],
        ["--fused", "--checkpoint", "--in-backward", "--chunk-rows", "5"],
        ["--masters", "--fused", "--in-backward"],
        ["--fused", "--in-backward", "--mapped", "FOLDER"],
    ],
)
def test_the_loops_train_alike(flags: list[str], tmp_path: Path) -> None:
    sizes_of_all = ["--model", TINY, "--batch-size", "2", "--seq-len", "9", "--steps", "3"]
    if "--masters" not in flags:
        sizes_of_all += ["--precision", "fp32"]

    def losses(own: list[str]) -> object:
        return loops.train(loops.options_of([*sizes_of_all, *own]))["losses"]

    found = losses([str(tmp_path) if flag == "FOLDER" else flag for flag in flags])
    tolerance = 1e-2 if "--masters" in flags else 1e-5
    assert found == pytest.approx(losses([]), rel=tolerance)


def test_the_loops_import_nothing_of_the_tool() -> None:
    script = (
        "import sys, benchmarks.rivals.loops\n"
        "sys.exit(any(name.partition('.')[0] == 'stages' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_an_allocator_is_the_one_given_else_tcmalloc_else_ours(tmp_path: Path) -> None:
    for name in ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4", "libtcmalloc_debug.so.4"):
        (tmp_path / name).touch()
    assert page_keeping_allocator("", [str(tmp_path)]).library == tmp_path / "libtcmalloc.so.4"
    given = tmp_path / "libmine.so.1"
    with pytest.raises(FileNotFoundError):
        page_keeping_allocator(str(given))
    given.touch()
    assert page_keeping_allocator(str(given)).library == given


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('error: too small'); print('more'); raise SystemExit(2)"]
    failing = Contender("failing", "", lambda workload, work, steps: command)
    run = run_once(failing, Workload(), tmp_path, 2)
    assert run.failure == "exit code 2: error: too small"
    assert run.counted_s == []


def test_an_interrupted_comparison_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def run(
        contender: Contender,
        workload: Workload,
        work: Path,
        steps: int,
        repeat: int = 0,
        limit_bytes: int = 0,
    ) -> Run:
        ran.append((contender.name, repeat))
        if len(ran) == 12:
            raise KeyboardInterrupt
        return run_of(
            contender.name, [9.0, FAST.get(contender.name, 1.0)], repeat=repeat, limit_bytes=limit_bytes
        )

    monkeypatch.setattr(comparison, "run_once", run)
    monkeypatch.setattr(comparison, "_prepare", lambda setting, turn: None)
    arguments = ["--quick", "--work", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        rivals.main(arguments)
    assert ran[:2] == [("eager", 0), ("checkpointing", 0)]
    assert ran[-2:] == [("eager", 1), ("checkpointing", 1)]  # everybody before anybody is repeated
    rivals.main([*arguments, "--resume"])
    assert ran[12:14] == [("checkpointing", 1), ("fused", 1)]
    assert len(set(ran)) == 20


@pytest.mark.slow
def test_a_small_comparison_runs(tmp_path: Path) -> None:
    rivals.main(["--quick", "--steps", "2", "--repeats", "1", "--work", str(tmp_path)])
    kept = msgspec.json.decode((tmp_path / "plain" / "record.json").read_bytes(), type=record.Record)
    assert {run.contender for run in kept.runs if not run.failure} >= {"eager", "hand-tuned", "ours at 1.5 M"}


def test_a_record_of_another_workload_is_not_taken_over(tmp_path: Path) -> None:
    record.save(record.Record("gpt2", runs=runs_with()), tmp_path / "record.json")
    assert len(record.load(tmp_path / "record.json", "gpt2").runs) == len(FAST)
    assert record.load(tmp_path / "record.json", "gpt2-xl").runs == []
