"""The report of a finished run: `python -m stages.report RUN_FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stages.artifacts.errors import StageError
from stages.process import REFUSED
from stages.report.files import write_report
from stages.report.terminal import print_summary
from stages.stopping import die_with_parent


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="Writes report.html and losses.csv of a finished run.")
    parser.add_argument("folder", type=Path, help="the run folder, with summary.json in it")
    folder: Path = parser.parse_args().folder
    try:
        run = write_report(folder)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    print_summary(run.summary, str(folder))


if __name__ == "__main__":
    main()
