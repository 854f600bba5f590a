"""Running a stage in a process of its own: both ends.

The parent starts `python -m MODULE --composed FILE --in KIND=PATH --out KIND=PATH ...`, passes
signals on, and says how a child died. The child reads its order, works, and reports its own peak.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.envelope import Provenance
from stages.artifacts.errors import ArtifactError, StageError
from stages.artifacts.graph import RegionGraph, Struct
from stages.config import RunConfig, load_composed
from stages.stopping import (
    ALL,
    END,
    PARENT,
    STOP,
    Requests,
    Stopped,
    die_with_parent,
    ending_by_exception,
    exit_code_of,
    signal_name,
)

#: stage -> module
MODULES = {
    "trace": "stages.trace",
    "profile": "stages.trace.profile",
    "roofline": "stages.trace.profile.roofline",
    "solve": "stages.solve",
    "whatif": "stages.report.whatif",
    "curve": "stages.solve.curve",
    "curve table": "stages.report.curve",
    "runtime": "stages.runtime",
    "report": "stages.report",
}

#: what every stage process gets in its environment unless the person has set it
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",  # progress appears while a stage works
    # a fork of a process that has used a tokenizer would otherwise print a warning
    "TOKENIZERS_PARALLELISM": "false",
}

#: prefix of the artifacts of the model in evaluation mode
EVALUATION = "evaluation_"

REFUSED = 2
#: the runtime's exit code when it has left its state and corrected costs for another plan; a code that
#: neither Python nor a shell gives by itself
REPLAN = 75
_GRACE_S = 5.0

Artifact = TypeVar("Artifact", bound=Struct)


def peak_bytes() -> int:
    """The largest resident memory (VmHWM) of this process, interpreter included.

    Since its start, or since the mark was reset through /proc/self/clear_refs.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:  # not Linux; bytes on macOS
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def versions() -> dict[str, str]:
    """Versions of what can change an artifact, read without importing any of it."""
    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        **{name: metadata.version(name) for name in ("torch", "transformers", "numpy", "msgspec")},
    }


# ---------------------------------------------------------------- the parent's end


def stage_command(
    stage: str,
    composed: Path,
    run_folder: Path,
    *,
    inputs: Mapping[str, Path],
    outputs: Mapping[str, Path],
    key: str = "",
) -> list[str]:
    """The command line that runs `stage` alone on given files."""
    line = [sys.executable, "-m", MODULES[stage], "--composed", str(composed), "--run-dir", str(run_folder)]
    for flag, paths in (("--in", inputs), ("--out", outputs)):
        for kind, path in paths.items():
            line += [flag, f"{kind}={path}"]
    return [*line, "--key", key] if key else line


def stage_environment(config: RunConfig, pool: Path | None = None) -> dict[str, str]:
    """What a stage process gets.

    Args:
        pool: The page pool's library, for stages that run the model.
    """
    environment = {**ENVIRONMENT, **os.environ, PARENT: str(os.getpid())}
    if pool is not None:
        environment["LD_PRELOAD"] = str(pool)
    if config.device.name == "cuda":
        # freed pages of one size serve blocks of another, so that what is reserved is near what is live
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if config.device.threads:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(config.device.threads)
    return environment


def run_child(command: list[str], environment: Mapping[str, str], *, finishes: bool = False) -> int:
    """Runs `command` to its end and returns its exit code (negative: minus the signal's number).

    Output goes where this process's goes. SIGINT and SIGTERM are passed on, and a child that does
    not end within five seconds is killed.

    Args:
        finishes: Whether the child first finishes its step and saves. It gets as long as that takes, and a
            second signal begins the five seconds.
    """
    requests = Requests()
    child: subprocess.Popen[bytes] | None = None
    sent: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        requests.note(number)
        if child is not None:
            send(child)

    def send(child: subprocess.Popen[bytes]) -> None:
        if requests.number and not sent:
            sent.append(STOP if finishes else requests.number)
            child.send_signal(sent[-1])
        if requests.twice and finishes and END not in sent:
            sent.append(END)
            child.send_signal(END)

    handlers = {number: signal.signal(number, pass_on) for number in ALL}
    try:
        # a group of its own: Ctrl-C then reaches the child once, through us, not twice
        child = subprocess.Popen(command, env=dict(environment), process_group=0)
        send(child)
        code = _wait(child, lambda: requests.twice or (bool(requests.number) and not finishes))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return -requests.number if requests.number else code


def _wait(child: subprocess.Popen[bytes], must_end: Callable[[], bool]) -> int:
    deadline = None
    while True:
        try:
            return child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if must_end():
                deadline = deadline or now + _GRACE_S
            if deadline and now > deadline:
                child.kill()


def describe_end(stage: str, code: int) -> str:
    """Why a stage that gave no reason itself has ended."""
    if code == -signal.SIGKILL:
        return (
            f"the {stage} stage was killed (SIGKILL); most likely the system or its memory limit ran out of "
            f"memory. Is the limit at least as large as budget?"
        )
    if (number := signal_of(code)) in ALL:
        return f"the {stage} stage was stopped by {signal_name(number)}"
    if code < 0:
        return f"the {stage} stage was ended by {signal.Signals(-code).name}"
    return f"the {stage} stage failed with exit code {code}; the traceback above says where"


def exit_code(code: int) -> int:
    """What a shell reports for a child's `code`: 128 + the signal's number."""
    return exit_code_of(-code) if code < 0 else code


def signal_of(code: int) -> int:
    """The number of the signal that an exit code tells of, as `run_child` or a shell gives it; else 0."""
    return -code if code < 0 else max(0, code - 128)


# ---------------------------------------------------------------- the child's end


@dataclass(frozen=True)
class Order:
    """What a stage process was told to do."""

    config: RunConfig
    run_folder: Path
    inputs: dict[str, Path] = field(default_factory=dict)
    outputs: dict[str, Path] = field(default_factory=dict)
    key: str = ""

    def load(self, record: type[Artifact]) -> Artifact:
        return self.load_with_provenance(record)[0]

    def load_evaluation(self) -> tuple[RegionGraph, Costs] | None:
        """Graph and costs of the model in evaluation mode, where the run evaluates."""
        paths = [self.inputs.get(EVALUATION + kind) for kind in ("graph", "costs")]
        if paths[0] is None or paths[1] is None:
            return None
        return envelope.load(paths[0], RegionGraph), envelope.load(paths[1], Costs)

    def load_with_provenance(self, record: type[Artifact]) -> tuple[Artifact, Provenance]:
        """Reads the input of type `record`.

        Raises:
            ArtifactError: It was not given, or is damaged.
        """
        kind = next(kind for kind, known in envelope.KINDS.items() if known is record)
        if kind not in self.inputs:
            raise ArtifactError(f"no {kind} was given; expected --in {kind}=PATH", key=kind)
        return envelope.load_with_provenance(self.inputs[kind], record)

    def save(self, artifact: Struct, known_peak_bytes: int = 0) -> None:
        """Writes `artifact` where the order says, with this process's peak so far.

        Args:
            known_peak_bytes: A peak from before the kernel's mark was reset, where the stage did so.
        """
        kind = envelope.kind_of(artifact)
        msgspec.json.encode(artifact)  # the peak of encoding belongs to the peak that is recorded
        hashes = {name: envelope.content_hash(path) for name, path in self.inputs.items()}
        provenance = Provenance(
            key=self.key, versions=versions(), peak_bytes=max(peak_bytes(), known_peak_bytes)
        )
        envelope.save(self.outputs[kind], artifact, inputs=hashes, provenance=provenance)


def _parse_order(arguments: list[str]) -> Order:
    parser = argparse.ArgumentParser()
    parser.add_argument("--composed", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--in", dest="inputs", action="append", default=[], metavar="KIND=PATH")
    parser.add_argument("--out", dest="outputs", action="append", default=[], metavar="KIND=PATH")
    parser.add_argument("--key", default="")
    parsed = parser.parse_args(arguments)

    def paths(items: list[str]) -> dict[str, Path]:
        return {kind: Path(path) for kind, _, path in (item.partition("=") for item in items)}

    config = load_composed(parsed.composed)
    return Order(config, parsed.run_dir, paths(parsed.inputs), paths(parsed.outputs), parsed.key)


def stage_main(stage: str, work: Callable[[Order], None]) -> None:
    """The whole of a stage's `__main__`: alone it composes and hands over, with --composed it works."""
    arguments = sys.argv[1:]
    if "--composed" not in arguments:
        from stages import cli  # Hydra, which the working process must not hold

        cli.main(lambda file, run_folder: pipeline_command(file, run_folder, only=stage), arguments)
    run_folder = Path(arguments[arguments.index("--run-dir") + 1]) if "--run-dir" in arguments else Path()
    die_with_parent()
    try:
        with ending_by_exception():
            work(_parse_order(arguments))
    except StageError as error:
        report_error(error.to_record(), run_folder)
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    except Stopped as stop:
        if stop.message:
            report_error(stop.to_record(), run_folder)
            print(stop.message, file=sys.stderr, flush=True)
        sys.exit(exit_code_of(stop.number))
    except Exception as error:
        report_error(_crash_record(error), run_folder)
        raise


def pipeline_command(composed: Path, run_folder: Path, only: str = "") -> list[str]:
    """The command line that runs the stages (or `only` one) of a composed configuration."""
    line = [sys.executable, "-m", "stages.run", "--composed", str(composed), "--run-dir", str(run_folder)]
    return [*line, "--only", only] if only else line


def report_error(record: Mapping[str, object], run_folder: Path) -> None:
    """Writes error.json into `run_folder`; where that is not to be had, the message on stderr is all."""
    try:
        envelope.write_atomically(run_folder / "error.json", msgspec.json.format(msgspec.json.encode(record)))
    except OSError as error:
        path = run_folder / "error.json"
        print(f"warning: cannot write {path}: {error.strerror or error}", file=sys.stderr, flush=True)


def _crash_record(error: Exception) -> dict[str, object]:
    """error.json of an exception that no refusal foresaw: its type, and the file and line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    return {**StageError(message, found=type(error).__name__).to_record(), "kind": "crash"}
