"""The manifest of a run between two steps, and a run that goes on from one."""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path

import msgspec
import torch

from stages.artifacts.checkpoint import Checkpoint, DataPosition, Progress
from stages.artifacts.errors import ArtifactError, ConfigError
from stages.artifacts.plan import Plan
from stages.config import RunConfig
from stages.runtime.checkpoint.read import restore
from stages.runtime.data import Batches
from stages.runtime.engine import Engine
from stages.runtime.loop import History, TrainingLoop


def describe(
    engine: Engine, loop: TrainingLoop, batches: Batches, config: RunConfig, first: tuple[int, int]
) -> Checkpoint:
    """The manifest of the state after the loop's last step, without its tensors.

    Args:
        first: Peak bytes and step nanoseconds that the plan of the run's first step predicted.
    """
    data = config.data
    return Checkpoint(
        step=len(loop.history.losses),
        model=engine.graph.model,
        precision=engine.graph.precision,
        implementation=engine.plan.implementation,
        data=DataPosition(data.name, data.batch_size, data.seq_len, batches.position),
        update_counts=engine.update_counts,
        # floats, so that the text is the same again after reading
        scaler=None if engine.scaler is None else {k: float(v) for k, v in engine.scaler.state().items()},
        micro_batches=engine.plan.placement.micro_batches,
        random_state=base64.b64encode(engine.device.rng_state().numpy().tobytes()).decode(),
        progress=_progress(loop, first),
        tensors=[],
        placement=placement_digest(engine.plan),
        accumulate=config.train.accumulate,
    )


def placement_digest(plan: Plan) -> str:
    """Names a placement, so that two plans can be told apart."""
    return hashlib.sha256(msgspec.json.encode(plan.placement)).hexdigest()


def go_on_from(
    folder: Path,
    manifest: Checkpoint,
    engine: Engine,
    loop: TrainingLoop,
    batches: Batches,
    config: RunConfig,
    *,
    same_run: bool,
) -> None:
    """Fills `engine` from the checkpoint in `folder` and sets loop and data to its step.

    Args:
        same_run: Whether a process of this run left it; its peak counts then.

    Raises:
        ConfigError: The configuration is not one that can go on from it.
        ArtifactError: The checkpoint is damaged, or of another model.
    """
    check_configuration(manifest, engine, config)
    precision = engine.graph.precision
    engine.restore(lambda homes: restore(folder, manifest, homes, precision), manifest.update_counts)
    if precision != manifest.precision:
        print(
            f"the checkpoint's precision is {manifest.precision}: weights are made anew for {precision} from "
            f"its {'weights' if manifest.precision == 'fp32' else 'fp32 masters'}",
            flush=True,
        )
    else:
        _restore_scaler(manifest, engine)
    batches.seek(manifest.data.position)
    peak_bytes = manifest.progress.peak_bytes if same_run else 0
    loop.go_on(_history(manifest.progress), _random_state(manifest), peak_bytes)


def check_configuration(manifest: Checkpoint, engine: Engine, config: RunConfig) -> None:
    """Raises:
    ConfigError: Model, optimizer or batches are others than the checkpoint's, or it has
        made more steps than are wanted. (All of them: what is left is the export.)
    """
    data = config.data
    expectations = (
        ("optimizer.name", engine.plan.implementation, manifest.implementation),
        ("data.batch_size", data.batch_size, manifest.data.batch_size),
        ("data.seq_len", data.seq_len, manifest.data.seq_len),
        ("train.accumulate", config.train.accumulate, manifest.accumulate),
        ("train.micro_batches", engine.plan.placement.micro_batches, manifest.micro_batches),
    )
    for key, found, expected in expectations:
        if found != expected:
            raise ConfigError(
                f"{key} is {found} and the checkpoint was written with {expected}; its position in the data "
                f"and its state hold for that alone. Resume with the same",
                key=key,
                found=str(found),
                expected=str(expected),
            )
    if manifest.step > config.steps:
        raise ConfigError(
            f"steps={config.steps} and the checkpoint has made {manifest.step}; expected at least as many "
            f"steps, counted from the run's beginning",
            key="steps",
            found=str(config.steps),
            expected=f"at least {manifest.step}",
        )


def _restore_scaler(manifest: Checkpoint, engine: Engine) -> None:
    if (engine.scaler is None) != (manifest.scaler is None):
        raise ArtifactError(
            f"the checkpoint of step {manifest.step} does not fit precision {manifest.precision}: loss scale "
            f"{manifest.scaler}. Use another one",
            key="resume",
        )
    if engine.scaler is None or manifest.scaler is None:
        return
    try:
        engine.scaler.restore(dict(manifest.scaler))
    except ValueError as error:
        raise ArtifactError(f"the checkpoint of step {manifest.step}: {error}", key="resume") from error


def _random_state(manifest: Checkpoint) -> torch.Tensor:
    """The generator's state, of the size that this torch has."""
    expected = torch.get_rng_state().numel()
    try:
        content = base64.b64decode(manifest.random_state, validate=True)
    except binascii.Error as error:
        raise ArtifactError(f"the checkpoint's random state is no base64: {error}", key="resume") from error
    if len(content) < expected:  # an accelerator adds its generator's
        raise ArtifactError(
            f"the checkpoint's random state has {len(content)} bytes; this torch expects {expected}",
            key="resume",
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _progress(loop: TrainingLoop, first: tuple[int, int]) -> Progress:
    history = loop.history
    return Progress(
        losses=[repr(loss) for loss in history.losses],
        grad_norms=[None if norm is None else repr(norm) for norm in history.grad_norms],
        skipped_steps=history.skipped_steps,
        step_times_s=history.step_times_s,
        step_peak_bytes=history.step_peak_bytes,
        moved_bytes=history.moved_bytes,
        evaluations=[{k: repr(v) for k, v in entry.items()} for entry in history.evaluations],
        tokens=history.tokens,
        peak_bytes=loop.peak_bytes_so_far,
        predicted_peak_bytes=first[0],
        predicted_step_ns=first[1],
        learning_rates=[[repr(rate) for rate in rates] for rates in history.learning_rates],
        loss_scales=history.loss_scales,
    )


def _history(progress: Progress) -> History:
    try:
        losses = [float(loss) for loss in progress.losses]
        norms = [None if norm is None else float(norm) for norm in progress.grad_norms]
        rates = [[float(rate) for rate in entry] for entry in progress.learning_rates]
        evaluations = [{k: float(v) for k, v in entry.items()} for entry in progress.evaluations]
    except ValueError as error:
        raise ArtifactError(f"the checkpoint's losses are no numbers: {error}", key="resume") from error
    return History(
        losses=losses,
        grad_norms=norms,
        skipped_steps=list(progress.skipped_steps),
        step_times_s=list(progress.step_times_s),
        step_peak_bytes=list(progress.step_peak_bytes),
        moved_bytes=list(progress.moved_bytes),
        evaluations=evaluations,
        learning_rates=rates,
        loss_scales=list(progress.loss_scales),
        tokens=progress.tokens,
    )
