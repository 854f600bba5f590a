"""Faults of whole commands: damaged files, processes killed at a system call, signals, folders of no use."""

from __future__ import annotations

import csv
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.faults.trial import REFUSED, SAME, SAVED, Trial, require
from tests.faults.injection import KILL, Fault, environment_of
from tests.sealed import sealed

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4
MODEL = (
    "+model=mlp", "model.arguments.width=512", "model.arguments.layers=8", "data=random",
    "data.batch_size=2", "data.seq_len=32", f"steps={STEPS}", "solver=greedy_async", "solver.replan=never",
    "checkpoint.every=1", "checkpoint.keep=3",
)  # fmt: skip
#: little above what tracing takes, so that training moves a part
BUDGET = "budget=385MB"
_TIMEOUT_S = 300.0
_REFUSED = 2
_MOST_S = 10.0


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    folder: Path

    @property
    def losses(self) -> list[str]:
        with (self.folder / "losses.csv").open(newline="") as file:
            return [row["loss"] for row in csv.DictReader(file)]

    @property
    def errors(self) -> int:
        """Messages that say why it ended."""
        return len(re.findall(r"^error: ", self.output, re.MULTILINE))


class Commands:
    """Runs of one job: one that nobody disturbs, whose store the others copy."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._count = 0
        self._last: Path | None = None

    @cached_property
    def undisturbed(self) -> Done:
        place = self.place("undisturbed")
        done = self.run(place)
        require(done.code == 0, f"the undisturbed run failed:\n{done.output[-2000:]}")
        return done

    def place(self, name: str = "") -> Path:
        """A folder for one trial's runs; the last one's goes."""
        if self._last is not None:
            shutil.rmtree(self._last)
        self._count += 1
        folder = self.work / (name or f"trial-{self._count}")
        folder.mkdir(parents=True)
        self._last = None if name else folder
        return folder

    def prepared(self, *names: str) -> Path:
        """A place that has the store, and what else is named, of the undisturbed run."""
        origin = self.undisturbed.folder.parent
        place = self.place()
        for name in ("store", *names):
            shutil.copytree(origin / name, place / name)
        return place

    def line(self, place: Path, *overrides: str) -> list[str]:
        settings = {
            "hydra.run.dir": place / "run",
            "store": place / "store",
            # costs are kept for the disk that they were measured on
            "tiers.disk": self.work / "disk",
            "checkpoint.dir": place / "checkpoints",
            "export.final": place / "final",
        }
        given = {item.partition("=")[0] for item in overrides}
        rest = [f"{key}={value}" for key, value in settings.items() if key not in given]
        return [sys.executable, "-m", "stages.run", *MODEL, BUDGET, *rest, *overrides]

    def run(self, place: Path, *overrides: str, environment: Mapping[str, str] | None = None) -> Done:
        done = subprocess.run(
            self.line(place, *overrides),
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        [folder] = [item.partition("=")[2] for item in overrides if item.startswith("hydra.run.dir=")] or [
            place / "run"
        ]
        return Done(done.returncode, done.stdout, Path(folder))

    def judge(self, done: Done, place: Path) -> str:
        """One error and exit code 2, or the right numbers; nothing left either way."""
        require(not [*(self.work / "disk").glob("*")], "scratch files are left")
        require("Traceback" not in done.output, f"a traceback:\n{done.output[-1500:]}")
        if done.code == 0:
            self.require_same(done, place)
            return SAME
        require(done.code == _REFUSED, f"exit code {done.code}:\n{done.output[-1500:]}")
        require(done.errors == 1, f"{done.errors} errors:\n{done.output[-1500:]}")
        return REFUSED

    def require_same(self, done: Done, place: Path) -> None:
        require(done.losses == self.undisturbed.losses, "other losses")
        mine, other = (one / "final" / "model.safetensors" for one in (place, self.undisturbed.folder.parent))
        require(mine.read_bytes() == other.read_bytes(), "other weights")


def trials(work: Path, quick: bool) -> Iterator[Trial]:
    """All kinds; a few of each where it should be quick."""
    commands = Commands(work)
    for made in (_artifacts, _checkpoints, _folders, _broken_writes, _kills, _signals):
        yield from [*made(commands)][:: 7 if quick else 1]


Damage = Callable[[Path], None]


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 0x08
    path.write_bytes(content)


def _nest(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def _pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": print}))


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _missing(path: Path) -> None:
    path.unlink()


def _header(name: str, value: object) -> Damage:
    def damage(path: Path) -> None:
        record = json.loads(path.read_bytes())
        record[name] = value
        path.write_text(json.dumps(record))

    return damage


def _content(change: Callable[[dict[str, object]], object]) -> Damage:
    def damage(path: Path) -> None:
        record = json.loads(path.read_bytes())
        change(record["content"])
        path.write_bytes(sealed(record))

    return damage


_ANY: dict[str, Damage] = {
    "cut in half": _truncate, "empty": _empty, "one bit changed": _flip, "deeply nested": _nest,
    "a pickle instead": _pickle, "a folder instead": _folder, "missing": _missing,
}  # fmt: skip
_JSON: dict[str, Damage] = {
    "another version": _header("schema_version", 99),
    "another kind": _header("kind", "timeline"),
    "an unknown field": _content(lambda content: content.update(surprise=1)),
    "a field gone": _content(lambda content: content.popitem()),
}


def _artifacts(commands: Commands) -> Iterator[Trial]:
    for kind in ("graph", "costs", "plan"):
        for what, damage in {**_ANY, **_JSON}.items():

            def run(kind: str = kind, damage: Damage = damage) -> str:
                place = commands.prepared()
                for path in (place / "store").rglob(f"{kind}.json"):
                    damage(path)
                return commands.judge(commands.run(place), place)

            yield Trial("artifact", f"{kind}: {what}", run)


def _checkpoints(commands: Commands) -> Iterator[Trial]:
    damages = {f"manifest {what}": ("checkpoint.json", damage) for what, damage in {**_ANY, **_JSON}.items()}
    damages["manifest leads out of its folder"] = (
        "checkpoint.json",
        lambda path: path.write_text(path.read_text().replace("state-00001", "../../state-00001")),
    )
    damages |= {f"state {what}": ("state-00001.safetensors", damage) for what, damage in _ANY.items()}
    for number, (what, (name, damage)) in enumerate(damages.items()):
        alone = number % 2 == 0

        def run(name: str = name, damage: Damage = damage, alone: bool = alone) -> str:
            place = commands.prepared("checkpoints")
            shutil.rmtree(place / "checkpoints" / f"step-{STEPS}")
            newest = place / "checkpoints" / f"step-{STEPS - 1}"
            damage(newest / name)
            done = commands.run(place, f"resume={newest if alone else newest.parent}")
            found = commands.judge(done, place)
            # a folder of several has an older one
            require(alone or found == SAME, "the older checkpoint was not used")
            require(not alone or found == REFUSED, "a damaged checkpoint was used")
            return found

        yield Trial("resume", f"{what}{'' if alone else ', an older one whole'}", run)


def _folders(commands: Commands) -> Iterator[Trial]:
    keys = ("store", "tiers.disk", "export.final", "checkpoint.dir", "hydra.run.dir", "resume")
    for key in (*keys, "data.path"):
        for what in ("a file", "in a file", "a dangling link")[: 3 if key == "hydra.run.dir" else 2]:

            def run(key: str = key, what: str = what) -> str:
                place = commands.prepared()
                path = place / "there"
                if what == "a dangling link":
                    path.symlink_to(place / "nowhere" / "deep")
                else:
                    path.write_text("no folder")
                if what == "in a file":
                    path /= "inside"
                changes = ["data=text"] if key == "data.path" and what != "a file" else []
                return commands.judge(commands.run(place, f"{key}={path}", *changes), place)

            yield Trial("folder", f"{key} is {what}", run)


def _broken_writes(commands: Commands) -> Iterator[Trial]:
    """Every stage cannot write its artifact; nothing is in the store to go around it."""
    modules = {"trace": "stages.trace", "profile": "stages.trace.profile", "solve": "stages.solve"}
    for name, module in {**modules, "runtime": "stages.runtime"}.items():
        for call, kind in (("sync", "ENOSPC"), ("rename", "EROFS")):

            def run(name: str = name, call: str = call, kind: str = kind, module: str = module) -> str:
                place = commands.prepared()
                if name != "runtime":
                    shutil.rmtree(place / "store" / name)
                artifact = {"trace": "graph", "profile": "costs", "solve": "plan", "runtime": "summary"}[name]
                fault = Fault(call, kind, f"{artifact}.json", lasting=True, stage=module)
                done = commands.run(place, environment=environment_of(fault))
                require(done.code != 0, "the fault did not happen")
                parts = list(place.rglob("*.part"))
                require(not parts, f"half-written: {parts}")
                found = commands.judge(done, place)
                require(found == REFUSED, "it went on")
                return found

            yield Trial("artifact", f"{name}: {kind} at {call}", run)


def _kills(commands: Commands) -> Iterator[Trial]:
    """`kill -9` in the middle of a system call, then the same command again."""
    modules = {"graph": "stages.trace", "costs": "stages.trace.profile", "plan": "stages.solve"}
    faults = [
        *(Fault("sync", KILL, f"{name}.json", stage=module) for name, module in modules.items()),
        *(Fault("rename", KILL, f"{name}.json", stage=module) for name, module in modules.items()),
        *(Fault("write", KILL, "tier-", at, stage="stages.runtime") for at in (1, 40)),
        *(Fault("read", KILL, "tier-", at, stage="stages.runtime") for at in (60,)),
        *(Fault("write", KILL, "checkpoints", at, stage="stages.runtime") for at in (5, 80)),
        *(Fault("sync", KILL, "checkpoints", at, stage="stages.runtime") for at in (1, 2)),
        *(Fault("rename", KILL, "checkpoints", at, stage="stages.runtime") for at in (2, 4)),
        *(Fault(call, KILL, "final", stage="stages.runtime") for call in ("write", "sync", "rename")),
    ]  # fmt: skip
    for fault in faults:

        def run(fault: Fault = fault) -> str:
            place = commands.prepared()
            for name, stage in (("graph", "trace"), ("costs", "profile"), ("plan", "solve")):
                if fault.path == f"{name}.json":
                    shutil.rmtree(place / "store" / stage)
            killed = commands.run(place, environment=environment_of(fault))
            require(killed.code != 0, "the fault did not happen")
            saved = place / "checkpoints"
            whole = list(saved.glob("step-*")) if saved.exists() else []
            done = commands.run(place, *([f"resume={saved}"] if whole else []))
            require(commands.judge(done, place) == SAME, f"it does not go on:\n{done.output[-800:]}")
            left = [path for path in place.rglob("*") if path.name.endswith((".part", ".old"))]
            require(not left, f"left by the killed run: {left}")
            return SAVED

        yield Trial("kill -9", f"{fault.stage}: at {fault.call} {fault.at} of {fault.path}", run)


def _signals(commands: Commands) -> Iterator[Trial]:
    for number in (signal.SIGTERM, signal.SIGINT):
        for step in (1, 2):

            def run(number: signal.Signals = number, step: int = step) -> str:
                place = commands.prepared()
                process = subprocess.Popen(
                    commands.line(place, "checkpoint.every=0"),
                    cwd=ROOT,
                    # slow enough that the signal comes before the end
                    env={**os.environ, **environment_of(Fault("read", "delay", "tier-", lasting=True))},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                assert process.stdout is not None
                sent = 0.0
                for text in process.stdout:
                    if text.startswith(f"step {step}/"):
                        process.send_signal(number)
                        sent = time.monotonic()
                code = process.wait(timeout=60)
                require(time.monotonic() - sent < _MOST_S, "it took over ten seconds to end")
                require(code in (0, 128 + number), f"exit code {code}")
                require(code != 0 or step == STEPS - 1, "the signal was not heard")
                if code:
                    done = commands.run(place, f"resume={place / 'checkpoints'}")
                    require(commands.judge(done, place) == SAME, "it does not go on")
                return SAVED

            yield Trial("signal", f"{number.name} after step {step}", run)
