"""Who may import whom, and what a process must not hold."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = ROOT / "stages"

#: folder -> the folders of ours that it may import beside itself (docs/architecture.md)
ALLOWED = {
    "artifacts": set[str](),
    "region": {"artifacts"},
    "device": {"artifacts", "region"},
    "optim": {"artifacts"},
    "models": {"artifacts"},
    "native": {"artifacts"},
    "trace": {"artifacts", "region", "device", "models", "optim"},
    "solve": {"artifacts"},
    "runtime": {"artifacts", "region", "device", "optim"},
    "report": {"artifacts"},
}
WITHOUT_TORCH = ("artifacts", "native", "solve", "report")


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_a_stage_imports_only_what_it_may(folder: str) -> None:
    for file in (STAGES / folder).rglob("*.py"):
        for name in _imports(file):
            parts = name.split(".")
            if parts[0] == "stages" and len(parts) > 1 and (STAGES / parts[1]).is_dir():
                assert parts[1] in ALLOWED[folder] | {folder}, f"{file} imports {name}"


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_planning_and_reporting_need_no_torch(folder: str) -> None:
    for file in (STAGES / folder).rglob("*.py"):
        assert "torch" not in {name.split(".")[0] for name in _imports(file)}, file


def _loaded(statement: str) -> set[str]:
    line = [sys.executable, "-c", f"{statement}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_the_training_process_holds_no_compiler_no_symbols_and_no_model_library() -> None:
    loaded = _loaded("import stages.runtime.stage")
    assert loaded.isdisjoint({"transformers", "sympy", "torch._dynamo", "hydra", "omegaconf"})


def test_the_composed_job_waits_without_torch() -> None:
    assert _loaded("import stages.run").isdisjoint({"torch", "hydra", "omegaconf", "numpy"})


def test_no_module_of_ours_hides_the_standard_library() -> None:
    """cProfile imports `profile`: a file of that name beside a script would take its place."""
    line = [sys.executable, "-m", "cProfile", "-m", "stages.run", "--help"]
    finished = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert not (STAGES / "profile").exists()
