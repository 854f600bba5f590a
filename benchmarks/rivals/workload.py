"""What everybody trains in a comparison, and the command lines that train it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stages import cli

ROOT = Path(__file__).resolve().parents[2]
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib")


@dataclass(frozen=True)
class Workload:
    """overrides: of the model, for a smaller one."""

    model: str = "gpt2"
    precision: str = "bf16"
    batch_size: int = 4
    seq_len: int = 512
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        changed = "".join(f" {override.removeprefix('+model.arguments.')}" for override in self.overrides)
        changed = changed.replace("model.arguments.", "")
        return f"{self.model}{changed} {self.precision} {self.batch_size}x{self.seq_len}"

    @property
    def arguments(self) -> list[str]:
        """Of this tool's command line, but for the budget."""
        sizes = [f"data.batch_size={self.batch_size}", f"data.seq_len={self.seq_len}", "data=random"]
        return [f"+model={self.model}", f"precision={self.precision}", *sizes, *self.overrides]

    def model_arguments(self) -> str:
        """What the model's configuration class is called with, as JSON."""
        return json.dumps(cli.compose([*self.arguments, "budget=1TB"]).model.arguments)

    def loop_arguments(self, steps: int) -> list[str]:
        """Of the rivals' loops."""
        sizes = ["--batch-size", str(self.batch_size), "--seq-len", str(self.seq_len)]
        return [
            *sizes,
            "--model",
            self.model_arguments(),
            "--precision",
            self.precision,
            "--steps",
            str(steps),
        ]


@dataclass(frozen=True)
class Allocator:
    """One that keeps freed pages for the next tensors. library: to be preloaded."""

    name: str
    library: Path


def page_keeping_allocator(given: str = "", folders: Sequence[str] = _LIBRARIES) -> Allocator:
    """`given`, else tcmalloc where it is installed, else this tool's page pool.

    Raises:
        FileNotFoundError: The file given is not there.
        subprocess.CalledProcessError: There is no tcmalloc, and no page pool can be compiled.
    """
    if given:
        if not Path(given).exists():
            raise FileNotFoundError(2, "no such allocator", given)
        return Allocator(Path(given).name.partition(".")[0], Path(given))
    for folder in folders:
        found = [path for path in Path(folder).rglob("libtcmalloc*.so.4") if "debug" not in path.name]
        if found:
            # the full one before the minimal one
            library = min(found, key=lambda path: len(path.name))
            return Allocator(library.name.partition(".")[0].removeprefix("lib"), library)
    command = [sys.executable, "-m", "stages.native"]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return Allocator("the page pool of this tool", Path(done.stdout.strip()))


def has_deepspeed(interpreter: str) -> bool:
    """Whether that Python can import DeepSpeed (found without importing it)."""
    if not interpreter or shutil.which(interpreter) is None:
        return False
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('deepspeed') is None)"
    return subprocess.run([interpreter, "-c", question], check=False).returncode == 0
