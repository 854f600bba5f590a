"""A training run between two steps, but for its tensors: what lies beside them in a checkpoint."""

from __future__ import annotations

import hashlib

import msgspec

from stages.artifacts.errors import ArtifactError
from stages.artifacts.graph import DtypeName, Natural, Struct


class StoredTensor(Struct, frozen=True):
    """One tensor of a checkpoint's files.

    name: "weight/NAME", "master/NAME" (fp32), "state/STATE/NAME" (of the optimizer), or "buffer/NAME"
    (buffers and constants of the model), NAME as in the graph.
    """

    name: str
    file: str  # a plain name beside the manifest
    dtype: DtypeName
    elements: Natural
    sha256: str


class DataPosition(Struct, frozen=True):
    """Where the data goes on: `position` batches of `batch_size` rows have been handed out."""

    name: str
    batch_size: Natural
    seq_len: Natural
    position: Natural


class Progress(Struct, frozen=True):
    """What the run has reported so far: one entry per step.

    Losses, norms and evaluations are text, as `repr` gives them: JSON has neither nan nor inf.
    """

    losses: list[str]
    grad_norms: list[str | None]
    skipped_steps: list[Natural]
    step_times_s: list[float]
    step_peak_bytes: list[Natural]
    moved_bytes: list[dict[str, Natural]]
    evaluations: list[dict[str, str]]
    tokens: Natural
    peak_bytes: Natural  # of the run's training processes so far, saving included
    #: what the plan of the first step predicted
    predicted_peak_bytes: Natural
    predicted_step_ns: Natural
    learning_rates: list[list[str]] = []  # of each param group, as repr gives them
    loss_scales: list[float] = []


class Checkpoint(Struct, frozen=True):
    """The manifest. It says nothing of tiers, slots or chunks: any plan of the same model goes on from it."""

    step: Natural
    model: str
    precision: str
    implementation: str  # of the optimizer, as in Costs
    data: DataPosition
    update_counts: dict[str, Natural]
    #: of the loss scale; None where there is none
    scaler: dict[str, float] | None
    #: slices that each batch was cut into, on which the numbers depend
    micro_batches: Natural
    #: state of torch's CPU generator, base64
    random_state: str
    progress: Progress
    tensors: list[StoredTensor]
    #: names the placement under which it was written, to tell whether another plan goes on
    placement: str = ""
    #: batches of each step
    accumulate: Natural = 1
    #: over all else, so that no altered number goes unnoticed
    digest: str = ""


def seal(checkpoint: Checkpoint) -> Checkpoint:
    """The same with its digest."""
    return msgspec.structs.replace(checkpoint, digest=_digest(checkpoint))


def check_seal(checkpoint: Checkpoint) -> None:
    """Raises:
    ArtifactError: Something was altered after it was written.
    """
    expected = _digest(checkpoint)
    if checkpoint.digest != expected:
        raise ArtifactError(
            f"the checkpoint of step {checkpoint.step} was altered after it was written; use another one",
            key="resume",
            found=checkpoint.digest,
            expected=expected,
        )


def _digest(checkpoint: Checkpoint) -> str:
    bare = msgspec.structs.replace(checkpoint, digest="")
    return hashlib.sha256(msgspec.json.encode(bare)).hexdigest()
