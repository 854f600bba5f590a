"""What the comparison must show, and whether it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from benchmarks.rivals.bounds import Bound
from benchmarks.rivals.running import Run

#: budgets of ours as shares of M, the peak of plain eager
SHARES = (1.0, 0.5, 0.28)
#: ours at the smallest limit at which DeepSpeed runs
AT_DEEPSPEED = "ours at DeepSpeed's limit"
#: run of DeepSpeed inside that limit
DEEPSPEED_LIMITED = "deepspeed in its limit"
#: step <= this x bound
STREAMED_FACTOR = 1.2


def name_at(share: float) -> str:
    """The name of our contender at a share of M."""
    return f"ours at {share:g} M"


class Row(msgspec.Struct, frozen=True):
    """All repeats of one contender: the median step after the first, the largest peak."""

    contender: str
    step_s: float | None
    step_times_s: list[float]
    peak_bytes: int
    limit_bytes: int
    budget_bytes: int
    least_feasible_bytes: int
    others_share: float
    failure: str


class Check(msgspec.Struct, frozen=True):
    """One criterion. got: None where something that it needs was not measured, for the reason in `note`.

    at_most: `got` must not exceed `asked`; else it must reach it. failed: our own run did not end well.
    """

    what: str
    asked: float
    got: float | None
    at_most: bool = False
    note: str = ""
    failed: bool = False

    @property
    def met(self) -> bool | None:
        """None: not measured, for want of a rival."""
        if self.got is None:
            return False if self.failed else None
        return self.got <= self.asked if self.at_most else self.got >= self.asked


def rows_of(runs: Sequence[Run]) -> dict[str, Row]:
    """A row for each contender, in the order in which they were first run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.contender, []).append(run)
    return {name: _row(name, repeats) for name, repeats in groups.items()}


def _row(name: str, repeats: Sequence[Run]) -> Row:
    times = [time_s for run in repeats for time_s in run.counted_s]
    failures = [run.failure for run in repeats if run.failure]
    return Row(
        contender=name,
        # a contender that failed once has not survived
        step_s=median(times) if times and not failures else None,
        step_times_s=times,
        peak_bytes=max(run.peak_bytes for run in repeats),
        limit_bytes=max(run.limit_bytes for run in repeats),
        budget_bytes=max(run.budget_bytes for run in repeats),
        least_feasible_bytes=max(run.least_feasible_bytes for run in repeats),
        others_share=max(run.others_share for run in repeats),
        failure=failures[0] if failures else "",
    )


def throughput_check(rows: Mapping[str, Row], mine: str, rivals: Sequence[str], asked: float) -> Check:
    """Throughput of `mine` over that of the fastest of `rivals`."""
    what = f"{mine}: throughput / "
    own = rows[mine].step_s if mine in rows else None
    if own is None:
        failed = mine in rows
        return Check(what + " or ".join(rivals), asked, None, note=_why(rows, mine), failed=failed)
    known = {name: rows[name].step_s for name in rivals if name in rows}
    times = {name: step_s for name, step_s in known.items() if step_s is not None}
    if not times:
        return Check(what + " or ".join(rivals), asked, None, note=_why(rows, rivals[0]))
    best = min(times, key=lambda name: times[name])
    return Check(what + best, asked, times[best] / own)


def _why(rows: Mapping[str, Row], name: str) -> str:
    """Why `name` has no time; the whole message is in the table of runs."""
    failure = rows[name].failure if name in rows else "not run"
    return f"{name}: {failure.partition(': ')[0]}"


def checks_of(
    rows: Mapping[str, Row],
    bounds: Mapping[str, Bound],
    in_memory: Sequence[str],
    shares: tuple[float, float, float] = SHARES,
) -> list[Check]:
    """Every criterion of a comparison.

    Args:
        shares: Of M, that ours ran at.
        bounds: Run of ours that moves something -> its bound.
        in_memory: Contenders that keep everything in memory.
    """
    full, half, tight = (name_at(share) for share in shares)
    return [
        throughput_check(rows, full, in_memory, 0.95),
        throughput_check(rows, full, ["eager"], 1.2),
        throughput_check(rows, half, ["hand-tuned"], 1.1),
        throughput_check(rows, half, ["eager"], 1.0),
        throughput_check(rows, tight, ["mapped"], 2.0),
        throughput_check(rows, tight, ["eager"], 0.75),
        throughput_check(rows, AT_DEEPSPEED, [DEEPSPEED_LIMITED], 1.5),
        _least_check(rows),
        *(streamed_check(name, rows[name].step_s, bound) for name, bound in bounds.items()),
        *(_budget_check(row) for name, row in rows.items() if name.startswith("ours")),
    ]


def _least_check(rows: Mapping[str, Row]) -> Check:
    what = "our least feasible budget / DeepSpeed's smallest limit"
    limit = rows[DEEPSPEED_LIMITED].limit_bytes if DEEPSPEED_LIMITED in rows else 0
    least = [row.least_feasible_bytes for row in rows.values() if row.least_feasible_bytes]
    if not limit or not least:
        return Check(what, 0.4, None, at_most=True, note=_why(rows, DEEPSPEED_LIMITED))
    return Check(what, 0.4, min(least) / limit, at_most=True)


def streamed_check(name: str, step_s: float | None, bound: Bound) -> Check:
    """A step against the slowest resource that it uses."""
    what = f"{name}: step / max(compute, bytes per link / bandwidth)"
    note = f"compute {bound.compute_s:.2f} s, read {bound.read_s:.2f} s, write {bound.write_s:.2f} s; "
    note += f"both over one disk {bound.disk_s:.2f} s"
    return Check(
        what, STREAMED_FACTOR, None if step_s is None else step_s / bound.step_s, at_most=True, note=note
    )


def _budget_check(row: Row) -> Check:
    what = f"{row.contender}: peak / budget"
    if row.failure:
        return Check(what, 1.0, None, at_most=True, note=row.failure.partition(": ")[0], failed=True)
    return Check(what, 1.0, row.peak_bytes / row.budget_bytes, at_most=True)
