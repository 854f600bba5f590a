"""Runs a command in a memory cgroup: the proof that a budget holds. Needs root and cgroup v1.

python -m tests.memory_limit 1200MB -- python -m stages.run +model=gpt2 budget=1200MB
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CONTROLLER = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Limited:
    """How a command under a limit ended. `killed` counts the kernel's out-of-memory kills."""

    code: int
    output: str
    peak_bytes: int
    killed: int


def is_available() -> bool:
    """Whether this process may make memory cgroups here."""
    return (_CONTROLLER / "memory.limit_in_bytes").exists() and os.access(_CONTROLLER, os.W_OK)


def run_limited(
    command: Sequence[str],
    limit_bytes: int,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 900,
    show: bool = False,
) -> Limited:
    """Runs `command`, all of whose processes together may use `limit_bytes`, and no swap."""
    group = _CONTROLLER / f"stages-test-{os.getpid()}-{os.urandom(4).hex()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        finished = subprocess.run(
            command,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            preexec_fn=enter,
            check=False,
        )
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        return Limited(finished.returncode, finished.stdout or "", peak, _kills(group))
    finally:
        group.rmdir()


def _kills(group: Path) -> int:
    for line in (group / "memory.oom_control").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0


def main() -> None:
    from stages.config import parse_size

    split = sys.argv.index("--")
    limited = run_limited(sys.argv[split + 1 :], parse_size(sys.argv[1], "limit"), timeout_s=3600, show=True)
    print(f"exit {limited.code}, peak {limited.peak_bytes} bytes, {limited.killed} out-of-memory kills")
    sys.exit(limited.code)


if __name__ == "__main__":
    main()
