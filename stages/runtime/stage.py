"""The last stage: trains on the plan and reports what happened."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stages import room
from stages.artifacts import graph as g
from stages.artifacts.checkpoint import Checkpoint
from stages.artifacts.costs import Costs
from stages.artifacts.errors import ArtifactError, InfeasibleBudgetError
from stages.artifacts.plan import Plan
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Timeline
from stages.config import RunConfig
from stages.device.choose import device_named
from stages.optim.groups import make_groups
from stages.region import memory
from stages.region.initial import iterate_initial
from stages.runtime import reporting
from stages.runtime.checkpoint.periodic import Periodic
from stages.runtime.checkpoint.read import candidates, load_manifest
from stages.runtime.checkpoint.record import describe, go_on_from
from stages.runtime.checkpoint.stopping import Ending
from stages.runtime.checkpoint.write import save
from stages.runtime.data import RowBatches, open_batches
from stages.runtime.engine import Engine
from stages.runtime.export import export_initial, export_weights
from stages.runtime.lanes.lane_set import LaneSet
from stages.runtime.live import LiveFiles
from stages.runtime.loop import TrainingLoop
from stages.runtime.replan.watch import Handover, ReplanRequested, Watch
from stages.runtime.scratch import ScratchFolder
from stages.runtime.tiers.beyond import Tiers
from stages.stopping import Stopped, StopRequest


@dataclass(frozen=True)
class Surroundings:
    """Files of a run beside its artifacts.

    Attributes:
        predicted: The simulator's timeline of the plan; None: first steps are not held against it.
        state: What an earlier process of this run left to go on from.
        handover: Where this one may leave its state, if the plan should be solved again.
        request: Whether the run was asked to end; it does so between two steps.
        reports: Whether the run folder gets a line per step.
    """

    run_folder: Path
    predicted: Path | None = None
    state: Path | None = None
    handover: Handover | None = None
    request: StopRequest = field(default_factory=StopRequest)
    reports: bool = True


def run(
    config: RunConfig,
    graph: g.RegionGraph,
    costs: Costs,
    plan: Plan,
    evaluation: g.RegionGraph | None = None,
    surroundings: Surroundings | None = None,
) -> tuple[Summary, list[Timeline]]:
    """Trains until `config.steps` steps are made, counted from the run's beginning.

    Args:
        evaluation: The model in evaluation mode, where `config.eval.every` asks for it.
        surroundings: None: in the present folder, and nothing but training.

    Raises:
        ReplanRequested: The first steps were not as predicted; see `stages.runtime.replan`.
        StorageError: A tier is short or broken.
        DataError: The data does not fit the model.
        ConfigError, ArtifactError: The checkpoint to resume from is missing, damaged or another job's.
        Stopped: `surroundings.request` was made.
    """
    started_ns = time.monotonic_ns()
    require_room(plan)
    memory.give_back_large_blocks(memory.LARGE_BLOCK_BYTES, costs.threads)
    torch.set_num_threads(costs.threads)
    surroundings = surroundings or Surroundings(Path(), reports=False)
    batches = open_batches(config, graph)
    evaluated = None if evaluation is None else open_batches(config, evaluation, config.eval.path or None)
    with open_engine(config, graph, plan, evaluation) as engine:
        loop = TrainingLoop(engine, batches, config, evaluated)
        origin = _fill(config, graph, engine, loop, batches, surroundings.state)
        if config.export.initial:
            export_initial(
                Path(config.export.initial), graph, config.seed, shard_bytes=config.export.shard_bytes
            )
        ending = _listen(config, costs, engine, loop, batches, surroundings, origin, started_ns)
        with ExitStack() as stack:
            if surroundings.reports:
                live = LiveFiles(surroundings.run_folder, loop.history, evaluates=evaluated is not None)
                # before all that may end the run
                loop.listeners.insert(0, stack.enter_context(live))
            _train(loop, surroundings.request, ending)
        try:
            if config.export.final:
                export_weights(
                    Path(config.export.final),
                    graph,
                    engine.weights(),
                    shard_bytes=config.export.shard_bytes,
                )
        except Stopped as stop:
            # the export is absent then; what was trained is not to be lost
            raise ending.end(config.steps) from stop
        replanned = origin is not None and surroundings.state is not None
        return reporting.summarise(graph, costs, plan, loop, origin, replanned=replanned), loop.timelines


def _train(loop: TrainingLoop, request: StopRequest, ending: Ending) -> None:
    with request.deferred():
        try:
            loop.run()
        except ReplanRequested:
            if request.number:  # came while the state was handed over, to nobody
                raise ending.end(len(loop.history.losses)) from None
            raise


def _fill(
    config: RunConfig,
    graph: g.RegionGraph,
    engine: Engine,
    loop: TrainingLoop,
    batches: RowBatches,
    state: Path | None,
) -> Checkpoint | None:
    """Initial values, or the training state to go on from; its manifest."""
    started = time.monotonic()
    if state is None and not config.resume:
        engine.load(iterate_initial(graph, config.seed))
        loop.start()
        print(f"initial values in place after {time.monotonic() - started:.1f} s", flush=True)
        return None
    folders = candidates(Path(config.resume)) if state is None else [state]
    manifest = _go_on(folders, engine, loop, batches, config, same_run=state is not None)
    if state is not None:
        shutil.rmtree(state)  # read; its space may be wanted
    seconds = time.monotonic() - started
    print(f"training state of step {manifest.step} in place after {seconds:.1f} s", flush=True)
    return manifest


def _go_on(
    folders: list[Path],
    engine: Engine,
    loop: TrainingLoop,
    batches: RowBatches,
    config: RunConfig,
    *,
    same_run: bool,
) -> Checkpoint:
    """Goes on from the first checkpoint of `folders` that is whole, and says which were not.

    Raises:
        ArtifactError: None is; the first one's.
    """
    first: ArtifactError | None = None
    for folder in folders:
        try:
            manifest = load_manifest(folder)
            go_on_from(folder, manifest, engine, loop, batches, config, same_run=same_run)
        except ArtifactError as error:
            print(f"warning: {folder} cannot be used: {error}", file=sys.stderr, flush=True)
            first = first or error
        else:
            if first is not None:
                print(f"warning: going on from the older {folder}", file=sys.stderr, flush=True)
            return manifest
    assert first is not None, "there are no folders"
    raise first


def _listen(
    config: RunConfig,
    costs: Costs,
    engine: Engine,
    loop: TrainingLoop,
    batches: RowBatches,
    surroundings: Surroundings,
    origin: Checkpoint | None,
    started_ns: int,
) -> Ending:
    """Adds what happens between steps: checkpoints, the watch over the first steps, the end on request."""
    prediction = engine.plan.prediction
    first = (prediction.peak_bytes, prediction.step_ns)
    if origin is not None:
        first = (origin.progress.predicted_peak_bytes, origin.progress.predicted_step_ns)

    def write(folder: Path) -> None:
        save(folder, engine.homes(), describe(engine, loop, batches, config, first))

    settings = config.checkpoint
    folder = Path(settings.dir or surroundings.run_folder / "checkpoints")
    periodic = Periodic(folder, settings.every, settings.keep, write)
    ending = Ending(surroundings.request, periodic, settings, config.steps)
    # the end before the watch: another plan is no concern of a run that was asked to end
    loop.listeners += [periodic, ending]
    # once is enough: costs that were corrected are not doubted again
    # its measures are of one pass through the model
    watches = config.solver.replan != "never" and config.train.accumulate == 1
    if watches and surroundings.predicted and surroundings.state is None:
        startup_ns = time.monotonic_ns() - started_ns
        watch = Watch(
            config, engine, loop, costs, surroundings.predicted, startup_ns, surroundings.handover, write
        )
        loop.listeners.append(watch)
    return ending


def require_room(plan: Plan) -> None:
    """Refuses, before anything is allocated, a plan for which this machine or memory cgroup is too small.

    Raises:
        InfeasibleBudgetError: The kernel would end this process.
    """
    most = room.most_bytes(memory.resident_bytes())
    if plan.device != "cpu":
        _require_host_room(plan, most)
        return
    needed = plan.prediction.peak_bytes
    if needed > most:
        raise InfeasibleBudgetError(
            f"training on this plan takes {needed} bytes of memory; {most} bytes are available to this "
            f"process (what the system has free, or the limit of its memory cgroup). Use a budget of at "
            f"most {most} bytes, or raise the limit",
            key="budget",
            found=str(needed),
            expected=f"at most {most} bytes",
            least_feasible_bytes=plan.prediction.least_feasible_bytes,
        )


def _require_host_room(plan: Plan, most: int) -> None:
    if plan.host_bytes > most:
        raise InfeasibleBudgetError(
            f"this plan takes {plan.host_bytes} bytes of host memory beside the device; {most} bytes are "
            f"available to this process. Set tiers.host_budget to at most {most} bytes, or raise the limit",
            key="tiers.host_budget",
            found=str(plan.host_bytes),
            expected=f"at most {most} bytes",
        )


@contextmanager
def open_engine(
    config: RunConfig, graph: g.RegionGraph, plan: Plan, evaluation: g.RegionGraph | None = None
) -> Iterator[Engine]:
    """The engine with its scratch file, lanes and kernel, as configured; closed and removed at the end.

    Raises:
        StorageError: The disk tier has no room for `plan.disk_bytes`.
    """
    groups = make_groups(config.optimizer, graph.parameters, graph.precision)
    with ScratchFolder(config.tiers.folder) as folder:
        poison = config.runtime.lane == "adversarial"
        tiers = Tiers(device_named(plan.device), plan, folder, late=poison)
        tiers.device.begin(plan.budget_bytes)
        lanes = LaneSet.of_kind(config.runtime.lane)
        engine = Engine(
            graph,
            plan,
            groups,
            tiers,
            lanes,
            evaluation,
            train=config.train,
            loss_scale=config.loss_scale,
            poison=poison,
        )
        try:
            yield engine
        finally:
            engine.close()
