"""losses.csv and evaluations.csv while training runs: a killed run keeps what it had reported."""

from __future__ import annotations

from io import TextIOWrapper
from pathlib import Path

from stages.artifacts.envelope import write_atomically
from stages.artifacts.errors import StorageError
from stages.artifacts.losses import (
    EVALUATIONS,
    EVALUATIONS_HEADER,
    LOSSES,
    LOSSES_HEADER,
    evaluations_line,
    losses_line,
)
from stages.runtime.engine import StepResult
from stages.runtime.loop import History


class LiveFiles:
    """A listener of the training loop; a context manager that closes the files.

    Where a run goes on, its files begin with the steps before it.

    Args:
        history: The loop's; its last entries are the step's that the listener is told of.

    Raises (also as a listener):
        StorageError: The folder cannot be written or is full.
    """

    def __init__(self, folder: Path, history: History, *, evaluates: bool) -> None:
        self._history = history
        self._folder = folder
        self._files: dict[str, TextIOWrapper] = {}
        self._evaluations = len(history.evaluations)
        lines = [_line(history, index) for index in range(len(history.losses))]
        self._begin(LOSSES, LOSSES_HEADER, lines)
        if evaluates:
            earlier = [evaluations_line(int(item["step"]), item["loss"]) for item in history.evaluations]
            self._begin(EVALUATIONS, EVALUATIONS_HEADER, earlier)

    def _begin(self, name: str, header: str, lines: list[str]) -> None:
        path = self._folder / name
        try:
            write_atomically(path, "".join([header, *lines]).encode())
            self._files[name] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise self._failed(name, error) from error

    def __call__(self, step: int, result: StepResult) -> None:
        self._append(LOSSES, _line(self._history, step - 1))
        for item in self._history.evaluations[self._evaluations :]:
            self._append(EVALUATIONS, evaluations_line(int(item["step"]), item["loss"]))
        self._evaluations = len(self._history.evaluations)

    def _append(self, name: str, line: str) -> None:
        try:
            self._files[name].write(line)
            self._files[name].flush()
        except OSError as error:
            raise self._failed(name, error) from error

    def _failed(self, name: str, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write {self._folder / name}: {error.strerror or error}. Free space there or give "
            f"another run folder with hydra.run.dir=DIR",
            key="hydra.run.dir",
            found=str(error),
            expected="a writable folder with space",
        )

    def __enter__(self) -> LiveFiles:
        return self

    def __exit__(self, *ended: object) -> None:
        for file in self._files.values():
            file.close()


def _line(history: History, index: int) -> str:
    step = index + 1
    return losses_line(
        step,
        history.losses[index],
        history.grad_norms[index],
        history.step_times_s[index],
        history.step_peak_bytes[index],
        skipped=step in history.skipped_steps,
        learning_rates=history.learning_rates[index] if index < len(history.learning_rates) else (),
        loss_scale=history.loss_scales[index] if index < len(history.loss_scales) else None,
    )
