"""Running a contender once, in a process and if asked a memory cgroup of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from benchmarks.processors import watch_others
from benchmarks.rivals.contenders import Contender, run_folder
from benchmarks.rivals.workload import ROOT, Workload
from stages.artifacts.summary import Summary
from tests.memory_limit import is_available, run_limited

TIMEOUT_S = 900.0


class Run(msgspec.Struct, frozen=True):
    """One whole run, or why there is none.

    peak_bytes: VmHWM of the training process; of this tool, the largest of all its processes. limit_bytes,
    cgroup_peak_bytes: of the memory cgroup; 0: none. budget_bytes: of this tool's own. failure: empty where
    all steps ran. others_share: of the processors' time, what other processes took meanwhile.
    """

    contender: str
    repeat: int
    limit_bytes: int = 0
    budget_bytes: int = 0
    step_times_s: list[float] = []
    peak_bytes: int = 0
    cgroup_peak_bytes: int = 0
    least_feasible_bytes: int = 0
    others_share: float = 0.0
    failure: str = ""

    @property
    def counted_s(self) -> list[float]:
        """Step times without the first, which makes optimizer state and maps memory."""
        return self.step_times_s[1:]


class _Finished(msgspec.Struct, frozen=True):
    code: int
    output: str
    cgroup_peak_bytes: int = 0
    killed: bool = False


def run_once(
    contender: Contender,
    workload: Workload,
    work: Path,
    steps: int,
    repeat: int = 0,
    limit_bytes: int = 0,
    timeout_s: float = TIMEOUT_S,
) -> Run:
    """Runs it to its end; a failure is part of the result, since some limits cannot be survived."""
    shutil.rmtree(work / "scratch", ignore_errors=True)
    command = contender.command(workload, work, steps)
    others = watch_others()
    blank = Run(contender.name, repeat, limit_bytes)
    if limit_bytes and not is_available():
        return msgspec.structs.replace(blank, failure="needs the right to make a memory cgroup")
    try:
        done = _execute(command, {**os.environ, **contender.environment}, limit_bytes, timeout_s)
    except subprocess.TimeoutExpired:
        return msgspec.structs.replace(blank, failure=f"not done after {timeout_s:.0f} s")
    finally:
        shutil.rmtree(work / "scratch", ignore_errors=True)
    found = msgspec.structs.replace(blank, cgroup_peak_bytes=done.cgroup_peak_bytes, others_share=others())
    if done.code != 0:
        return msgspec.structs.replace(found, failure=_reason(done))
    folder = run_folder(work, contender.name)
    return _of_ours(found, folder) if "stages.run" in command else _of_loop(found, done.output)


def _execute(
    command: list[str], environment: dict[str, str], limit_bytes: int, timeout_s: float
) -> _Finished:
    if limit_bytes:
        limited = run_limited(command, limit_bytes, environment=environment, cwd=ROOT, timeout_s=timeout_s)
        return _Finished(limited.code, limited.output, limited.peak_bytes, bool(limited.killed))
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return _Finished(done.returncode, done.stdout)


def _reason(done: _Finished) -> str:
    if done.killed:
        return "killed: out of memory"
    lines = [line for line in done.output.strip().splitlines() if line.strip()]
    refusals = [line for line in lines if line.startswith("error:")]
    return f"exit code {done.code}: {(refusals or lines or ['no message'])[-1][:300]}"


def _of_loop(run: Run, output: str) -> Run:
    """A loop's last line that is JSON; libraries may print after it."""
    line = next(line for line in reversed(output.splitlines()) if line.startswith('{"step_times_s"'))
    result = json.loads(line)
    return msgspec.structs.replace(run, step_times_s=result["step_times_s"], peak_bytes=result["peak_bytes"])


def _of_ours(run: Run, folder: Path) -> Run:
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    # where a better plan took over, its steps are the run's
    first = summary.replanned_at or 0
    return msgspec.structs.replace(
        run,
        step_times_s=summary.step_times_s[first:],
        budget_bytes=summary.budget_bytes,
        peak_bytes=summary.peak_bytes,
        least_feasible_bytes=summary.least_feasible_bytes,
    )
