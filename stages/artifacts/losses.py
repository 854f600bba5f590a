"""losses.csv and evaluations.csv, one line per step or evaluation, as a run writes and others read them."""

from __future__ import annotations

from collections.abc import Sequence

LOSSES = "losses.csv"
EVALUATIONS = "evaluations.csv"
#: seconds of the step, and its peak of resident memory
#: learning_rate: of each param group, separated by blanks
LOSSES_HEADER = "step,loss,grad_norm,skipped,time_s,peak_bytes,learning_rate,loss_scale\n"
EVALUATIONS_HEADER = "step,loss\n"


def losses_line(
    step: int,
    loss: float,
    norm: float | None,
    time_s: float | None,
    peak_bytes: int | None,
    *,
    skipped: bool,
    learning_rates: Sequence[float] = (),
    loss_scale: float | None = None,
) -> str:
    """Numbers are written so that reading them back gives the same; what is not known stays empty."""
    known = ["" if number is None else repr(number) for number in (norm, time_s, peak_bytes, loss_scale)]
    rates = " ".join(map(repr, learning_rates))
    return f"{step},{loss!r},{known[0]},{int(skipped)},{known[1]},{known[2]},{rates},{known[3]}\n"


def evaluations_line(step: int, loss: float) -> str:
    return f"{step},{loss!r}\n"
