"""Case 1: a native compiler that does not work. Nothing here needs one."""

from __future__ import annotations

from pathlib import Path

from tests.cases.commands import run

BROKEN = {"CXX": "/bin/false", "CC": "/bin/false", "TORCH_EXTENSIONS_DIR": "/nonexistent"}


def test_the_command_works_without_a_compiler(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "model=mlp",
        "model.arguments.width=32",
        "budget=2GB",
        "steps=2",
        "data=random",
        "data.batch_size=2",
        "data.seq_len=32",
        environment=BROKEN,
    )
    assert done.code == 0, done.stderr
    assert len(done.record("summary.json")["losses"]) == 2
    # what a destructor raises does not change the exit code, but it is printed
    for sign in ("Exception ignored", "Traceback", "/bin/false"):
        assert sign not in done.stderr
        assert sign not in done.stdout
