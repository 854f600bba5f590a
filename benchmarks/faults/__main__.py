"""Lets things go wrong at every point of a run, and looks at what comes of it.

    python -m benchmarks.faults             # over 200 faults, about 20 minutes
    python -m benchmarks.faults --quick     # every seventh; nothing is written to the results

Every fault must end in one clear error (exit code 2, nothing half-written, no scratch file, no thread left,
within ten seconds, and the last checkpoint goes on), or in the right numbers, bitwise those of a run that
nothing disturbed. Exit code 1 if one does not. Results: benchmarks/results/faults.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults import in_process, whole
from benchmarks.faults.trial import Outcome, Trial, WrongError

RESULT = Path(__file__).resolve().parents[1] / "results" / "faults.md"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="kinds that contain this")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="stages-faults-") as work:
        found = [
            _happen(trial)
            for module in (in_process, whole)
            for trial in module.trials(Path(work) / module.__name__.rpartition(".")[2], options.quick)
            if options.only in trial.kind
        ]
    table = as_markdown(found)
    print(table)
    if not options.quick and not options.only:
        options.out.write_text(table)
    return 1 if any(outcome.wrong for outcome in found) else 0


def _happen(trial: Trial) -> Outcome:
    started, said = time.monotonic(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            result, wrong = trial.run(), ""
    except WrongError as error:
        result, wrong = "wrong", str(error)
    outcome = Outcome(trial.kind, trial.what, result, time.monotonic() - started, wrong)
    print(
        f"{outcome.kind}: {outcome.what}: {outcome.wrong or outcome.result}, {outcome.seconds:.1f} s",
        flush=True,
    )
    return outcome


def as_markdown(found: Sequence[Outcome]) -> str:
    """A row for each kind, then what was wrong."""
    results = sorted({outcome.result for outcome in found})
    lines = [
        "# Injected faults",
        "",
        f"`python -m benchmarks.faults`: {len(found)} faults, "
        f"{sum(bool(outcome.wrong) for outcome in found)} of them with a wrong end.",
        "",
        f"| kind | faults | {' | '.join(results)} |",
        f"|---|---|{'---|' * len(results)}",
    ]
    for kind in dict.fromkeys(outcome.kind for outcome in found):
        mine = [outcome for outcome in found if outcome.kind == kind]
        counts = [str(sum(outcome.result == result for outcome in mine)) for result in results]
        lines.append(f"| {kind} | {len(mine)} | {' | '.join(counts)} |")
    wrong = [outcome for outcome in found if outcome.wrong]
    lines += (
        ["", *(f"- {outcome.kind}, {outcome.what}: {outcome.wrong}" for outcome in wrong)] if wrong else []
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
