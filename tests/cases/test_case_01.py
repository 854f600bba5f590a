"""Case 1: a native compiler that does not work: the job works without, and says once what failed."""

from __future__ import annotations

from pathlib import Path

from tests.cases.commands import run

BROKEN = {"CXX": "/bin/false", "CC": "/bin/false", "TORCH_EXTENSIONS_DIR": "/nonexistent"}
JOB = (
    "model=mlp", "model.arguments.width=32", "budget=2GB", "steps=2", "data=random",
    "data.batch_size=2", "data.seq_len=32",
)  # fmt: skip


def test_the_command_works_without_a_compiler(tmp_path: Path) -> None:
    for name in ("broken", "whole"):
        (tmp_path / name).mkdir()
    # a cache folder of its own: nothing that a working compiler has made is in it
    broken = run(tmp_path / "broken", *JOB, environment={**BROKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert broken.code == 0, broken.stderr
    assert broken.stdout.count("/bin/false") == 1
    # what a destructor raises does not change the exit code, but it is printed
    for sign in ("Exception ignored", "Traceback", "/bin/false"):
        assert sign not in broken.stderr
    summary = broken.record("summary.json")
    assert summary["allocator"] == "glibc"
    whole = run(tmp_path / "whole", *JOB)
    assert whole.code == 0, whole.stderr
    assert whole.record("summary.json")["allocator"] == "page pool"
    assert whole.record("summary.json")["losses"] == summary["losses"]


def test_a_compiler_that_is_required_is_named_before_work_starts(tmp_path: Path) -> None:
    environment = {**BROKEN, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run(tmp_path, *JOB, "runtime.allocator=pool", environment=environment)
    assert done.code == 2
    assert "runtime.allocator" in done.stderr
    assert "/bin/false" in done.stderr
    assert "[stages] trace: started" not in done.stdout
