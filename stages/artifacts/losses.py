"""losses.csv and evaluations.csv, one line per step or evaluation, as a run writes and others read them."""

from __future__ import annotations

LOSSES = "losses.csv"
EVALUATIONS = "evaluations.csv"
#: seconds of the step, and its peak of resident memory
LOSSES_HEADER = "step,loss,grad_norm,skipped,time_s,peak_bytes\n"
EVALUATIONS_HEADER = "step,loss\n"


def losses_line(
    step: int, loss: float, norm: float | None, time_s: float | None, peak_bytes: int | None, *, skipped: bool
) -> str:
    """Numbers are written so that reading them back gives the same; what is not known stays empty."""
    known = ["" if number is None else repr(number) for number in (norm, time_s, peak_bytes)]
    return f"{step},{loss!r},{known[0]},{int(skipped)},{known[1]},{known[2]}\n"


def evaluations_line(step: int, loss: float) -> str:
    return f"{step},{loss!r}\n"
