"""The wheel works elsewhere: configuration travels inside the package."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder of its own."""
    built = tmp_path_factory.mktemp("wheel")
    line = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(built)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True)
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_holds_every_module_and_every_option_and_no_test(installed: Path) -> None:
    sources = {path.relative_to(ROOT) for path in (ROOT / "stages").rglob("*.py")}
    options = {Path("stages") / path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml")}
    packed = {path.relative_to(installed) for path in installed.rglob("*") if path.suffix in (".py", ".yaml")}
    assert packed == sources | options


def test_the_wheel_composes_from_an_empty_folder_with_its_own_configuration(
    installed: Path, tmp_path: Path
) -> None:
    # site-packages of the running interpreter stay reachable, the checkout does not
    paths = [str(installed), *(path for path in sys.path if "site-packages" in path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    line = [sys.executable, "-m", "stages.run", "+model=mlp", "budget=1GB", "--info", "searchpath"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(installed / "stages" / "conf") in done.stdout
    assert str(ROOT) not in done.stdout


def test_torch_is_asked_for_in_the_tested_range_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.14" in project["dependencies"]
    extras = [requirement for extra in project["optional-dependencies"].values() for requirement in extra]
    assert not [requirement for requirement in extras if requirement.startswith("torch")]
