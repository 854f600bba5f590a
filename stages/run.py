"""The composed job: trace, profile, solve, train, report, each in a process of its own.

    python -m stages.run model=gpt2 budget=8GB
    python -m stages.run model=mlp budget=1GB steps=5

What has been made before from the same configuration, code, versions and machine is reused, and the
run says so. This process holds neither Hydra nor torch while the stages work.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from stages import keys
from stages.artifacts.envelope import write
from stages.artifacts.errors import ArtifactError, StageError
from stages.artifacts.store import Store
from stages.config import RunConfig, TrainConfig, format_size, load_composed, save_composed
from stages.native.build import PagePool, page_pool
from stages.preconditions import (
    chosen_device,
    for_hardware,
    require_checkpoint,
    require_data,
    require_device,
    require_evaluation_data,
    require_host_tier,
    require_log,
)
from stages.process import (
    EVALUATION,
    MODULES,
    REFUSED,
    REPLAN,
    describe_end,
    exit_code,
    pipeline_command,
    report_error,
    run_child,
    signal_of,
    stage_command,
    stage_environment,
)
from stages.report.tensorboard import following
from stages.runtime.scratch import ScratchFolder
from stages.stopping import ALL, Stopped, die_with_parent, ending_by_exception, exit_code_of

#: stages that run the model, and so want freed pages kept
MODEL_STAGES = ("profile", "runtime")
#: stage -> the kinds of artifact that it leaves in the store
PRODUCTS = {
    "trace": ("graph",), "profile": ("costs",), "roofline": ("costs",), "solve": ("plan", "timeline"),
}  # fmt: skip
STAGES = ("trace", "profile", "solve", "runtime", "report")
#: a plan for hardware that is not here: the last two stages do not follow
PLANNING = ("trace", "roofline", "solve")


class StageFailedError(Exception):
    """A stage process ended with `code` (as a shell would report it)."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


@dataclass
class Pipeline:
    """One job: its configuration, its run folder, and the artifacts found or made so far."""

    config: RunConfig
    composed: Path
    run_folder: Path
    store: Store
    artifacts: dict[str, Path] = field(default_factory=dict)

    def run(self, only: str = "") -> None:
        """Runs every stage, or only one, whose predecessors must then be in the store.

        Raises:
            ArtifactError: A predecessor of `only` has not been run.
            StageFailedError: A stage refused or died; it has said why.
        """
        if self.config.wants_curve:
            self._draw_curve()
            return
        if self.config.hardware.planned_for:
            self._plan_elsewhere(only)
            return
        wanted = [only] if only else list(STAGES)
        if only != "trace":
            self.pool  # noqa: B018 - made, or refused, before work starts
        for stage in STAGES[: STAGES.index(wanted[-1]) + 1]:
            if stage in PRODUCTS:
                self._provide(stage, stage in wanted)
                if self.config.eval.every and stage in ("trace", "profile"):
                    self._evaluation().provide_for_evaluation(stage, stage in wanted, self.artifacts)
            elif stage == "runtime" and not only and self.config.solver.replan != "never":
                self._train_watched()
            elif stage in wanted:
                self._start(stage, self.artifacts, {})
        if only == "runtime":
            self._start("report", self.artifacts, {})

    @functools.cached_property
    def pool(self) -> PagePool:
        found = page_pool(self.config.runtime.allocator)
        if found.library is None:
            say(f"memory: freed pages go back to the system, which costs time ({found.reason})")
        return found

    def _draw_curve(self) -> None:
        """Plans over budgets; makes all that they need, and trains nothing."""
        for stage in ("trace", "roofline" if self.config.hardware.planned_for else "profile"):
            self._provide(stage, True)
        self._start("curve", self.artifacts, {"curve": self.run_folder / "curve.json"})
        self._start("curve table", {}, {})

    def _plan_elsewhere(self, only: str) -> None:
        """Makes all that a plan for other hardware needs, whatever the store lacks."""
        last = "roofline" if only == "profile" else only
        for stage in PLANNING[: PLANNING.index(last) + 1]:
            self._provide(stage, True)
        if last == "solve":
            self._start("whatif", {}, {})

    def _train_watched(self) -> None:
        """Trains, and where the first steps were not as predicted, solves again and goes on from there.

        Only one process at a time: the budget holds for each, and a memory limit for all together.
        """
        folder = self.run_folder / "replanned"
        with ScratchFolder(self.config.tiers.folder) as scratch:
            handover = {"state": scratch / "state", "costs": folder / "costs.json"}
            if self._start("runtime", self.artifacts, handover, may_end=(REPLAN,)) != REPLAN:
                return
            self._solve_again(handover["costs"], folder)
            self._start("runtime", {**self.artifacts, "state": handover["state"]}, {}, what="goes on")

    def _solve_again(self, costs: Path, folder: Path) -> None:
        """In the run folder, not in the store: costs of one run's steps never come again."""
        inputs = {kind: path for kind, path in self.artifacts.items() if kind not in ("plan", "predicted")}
        inputs |= {"costs": costs, "previous": self.artifacts["plan"]}
        made = {"plan": folder / "plan.json", "timeline": folder / "timeline.json"}
        self._start("solve", inputs, made, what="again, with the costs of the first steps")
        self.artifacts |= {"costs": costs, "plan": made["plan"], "predicted": made["timeline"]}
        for kind in ("costs", "plan"):
            _copy(self.artifacts[kind], self.run_folder / f"{kind}.json")

    def _evaluation(self) -> Pipeline:
        """The same job with the model in evaluation mode, in a folder of its own."""
        folder = self.run_folder / "evaluation"
        trace = dataclasses.replace(self.config.trace, mode="eval")
        # no evaluations of the evaluation
        never = dataclasses.replace(self.config.eval, every=0)
        # evaluation takes a batch as it is
        solver = dataclasses.replace(self.config.solver, micro_batches="given")
        config = dataclasses.replace(self.config, trace=trace, eval=never, train=TrainConfig(), solver=solver)
        composed = folder / "composed.json"
        save_composed(config, composed)
        found = {
            kind.removeprefix(EVALUATION): path
            for kind, path in self.artifacts.items()
            if kind.startswith(EVALUATION)
        }
        return Pipeline(config, composed, folder, self.store, found)

    def provide_for_evaluation(self, stage: str, may_run: bool, artifacts: dict[str, Path]) -> None:
        """As `_provide`; adds what it made to the training job's `artifacts`."""
        say(f"{stage}: in evaluation mode")
        self._provide(stage, may_run)
        artifacts |= {EVALUATION + kind: path for kind, path in self.artifacts.items()}

    def _provide(self, stage: str, may_run: bool) -> None:
        """Finds the artifacts of `stage` in the store, or makes them, and copies them to the run folder."""
        key = self._key(stage)
        paths = {kind: self.store.path(stage, key, kind) for kind in PRODUCTS[stage]}
        reused = self.store.holds(stage, key, PRODUCTS[stage])
        if reused:
            if may_run:
                say(f"{stage}: unchanged, reused from the store ({key})")
        elif may_run:
            self._start(stage, self.artifacts, paths, key)
        else:
            raise ArtifactError(
                f"the store {self.store.folder} has no result of the {stage} stage for this "
                f"configuration; run `python -m {MODULES[stage]}` with the same arguments first",
                key="store",
                found="nothing",
                expected=f"{stage}/{key}",
            )
        # the timeline is the predicted one; the run folder's timeline.json holds both
        self.artifacts |= {
            ("predicted" if kind == "timeline" else kind): path for kind, path in paths.items()
        }
        if stage == "solve" and reused:
            self._start("solve", self.artifacts, {}, what="check of the plan")
        for kind, path in paths.items():
            if kind != "timeline":
                _copy(path, self.run_folder / path.name)

    def _key(self, stage: str) -> str:
        if stage == "trace":
            return keys.trace_key(self.config)
        if stage == "roofline":
            return keys.roofline_key(self.config, self.artifacts["graph"])
        if stage == "profile":
            return keys.profile_key(self.config, self.artifacts["graph"], self.pool.name)
        return keys.solve_key(self.config, self.artifacts)

    def _start(
        self,
        stage: str,
        inputs: dict[str, Path],
        outputs: dict[str, Path],
        key: str = "",
        what: str = "",
        may_end: tuple[int, ...] = (),
    ) -> int:
        """Runs a stage to its end; its exit code: 0, or one of `may_end`.

        Raises:
            StageFailedError: It ended with any other.
        """
        say(f"{stage}: {what or 'started'}")
        begin = time.monotonic()
        if stage in ("report", "whatif", "curve table"):
            command = [sys.executable, "-m", MODULES[stage], str(self.run_folder)]
        else:
            command = stage_command(
                stage, self.composed, self.run_folder, inputs=inputs, outputs=outputs, key=key
            )
        pool = self.pool.library if stage in MODEL_STAGES else None
        environment = stage_environment(self.config, pool)
        with self._logging(stage):
            code = run_child(command, environment, finishes=stage == "runtime")
        if code != 0 and code not in may_end:
            self._explain(stage, code)
            raise StageFailedError(exit_code(code))
        say(f"{stage}: done in {time.monotonic() - begin:.1f} s")
        return code

    def _logging(self, stage: str) -> AbstractContextManager[None]:
        if stage != "runtime" or self.config.log != "tensorboard":
            return nullcontext()
        return following(self.run_folder, stage_environment(self.config))

    def _explain(self, stage: str, code: int) -> None:
        """A refusal has explained itself; any other end is described here."""
        if code == REFUSED:
            return
        message, stopped = describe_end(stage, code), signal_of(code) in ALL
        print(message if stopped else f"error: {message}", file=sys.stderr, flush=True)
        if not (self.run_folder / "error.json").exists():
            record = StageError(message, found=f"exit code {code}", expected="exit code 0").to_record()
            kind = "stopped" if stopped else "killed" if code < 0 else "crash"
            report_error({**record, "kind": kind}, self.run_folder)


def _copy(path: Path, target: Path) -> None:
    write(target, path.read_bytes())


def say(message: str) -> None:
    print(f"[stages] {message}", flush=True)


def run_composed(arguments: list[str]) -> int:
    """Runs the job whose configuration has been composed; returns the exit code."""
    try:
        with ending_by_exception():
            return _run_composed(arguments)
    except Stopped as stop:
        return exit_code_of(stop.number)


def _run_composed(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--composed", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--only", choices=STAGES, default="")
    parsed = parser.parse_args(arguments)
    die_with_parent()  # of a sweep
    run_folder: Path = parsed.run_dir
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "error.json").unlink(missing_ok=True)
    try:
        config = load_composed(parsed.composed)
        require_device(config)
        if config.hardware.planned_for:
            config = for_hardware(config, parsed.only)
            save_composed(config, parsed.composed)
        else:
            config = chosen_device(config)
            save_composed(config, parsed.composed)
            require_host_tier(config)
        if parsed.only in ("", "runtime") and not config.wants_curve:
            require_data(config)
            require_checkpoint(config)
            require_evaluation_data(config)
            require_log(config)
        budget = "all budgets" if config.wants_curve else f"budget {format_size(config.budget_bytes)}"
        say(f"{config.model.name}, {budget}, {config.precision}, run folder {run_folder}")
        store = Store(Path(config.store) if config.store else None)
        Pipeline(config, parsed.composed, run_folder, store).run(parsed.only)
    except StageError as error:
        report_error(error.to_record(), run_folder)
        print(f"error: {error}", file=sys.stderr, flush=True)
        return REFUSED
    except StageFailedError as failure:
        return failure.code
    return 0


def main() -> None:
    arguments = sys.argv[1:]
    if "--composed" in arguments:
        sys.exit(run_composed(arguments))
    from stages import cli  # Hydra, which is gone once the command that it makes has replaced this process

    cli.main(pipeline_command, arguments)


if __name__ == "__main__":
    main()
