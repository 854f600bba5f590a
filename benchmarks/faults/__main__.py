"""Lets things go wrong at every point of a run, and looks at what comes of it.

    python -m benchmarks.faults             # over 200 faults, about 20 minutes
    python -m benchmarks.faults --quick     # every seventh; nothing is written to the results
    python -m benchmarks.faults --only signal   # these kinds again, in place of what the results have of them

Every fault must end in one clear error (exit code 2, nothing half-written, no scratch file, no thread left,
within ten seconds, and the last checkpoint goes on), or in the right numbers, bitwise those of a run that
nothing disturbed. Exit code 1 if one does not. Results: benchmarks/results/faults.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from pathlib import Path

import msgspec

from benchmarks.faults.sharing import WORKERS, share
from benchmarks.faults.trial import Outcome

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
    with (
        tempfile.TemporaryDirectory(prefix="stages-faults-") as work,
        ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as workers,
    ):
        shares = [
            workers.submit(share, Path(work) / str(index), options.quick, options.only, index)
            for index in range(WORKERS)
        ]
        turns = zip_longest(*(one.result() for one in shares))
    found = [outcome for turn in turns for outcome in turn if outcome is not None]
    record = options.out.with_suffix(".json")
    if options.only and not options.quick and record.exists():
        known = msgspec.json.decode(record.read_bytes(), type=list[Outcome])
        found = [outcome for outcome in known if options.only not in outcome.kind] + found
    table = as_markdown(found)
    print(table)
    if not options.quick:
        options.out.write_text(table)
        record.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    return 1 if any(outcome.wrong for outcome in found) else 0


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
