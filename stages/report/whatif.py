"""The forecast of a plan for other hardware: `python -m stages.report.whatif RUN_FOLDER`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from stages.artifacts import envelope
from stages.artifacts.costs import Costs
from stages.artifacts.errors import StageError
from stages.artifacts.graph import RegionGraph
from stages.artifacts.plan import Plan
from stages.config import load_composed
from stages.process import REFUSED, die_with_parent
from stages.report.forecast import Forecast, forecast, print_forecast


def write_forecast(folder: Path) -> Forecast:
    """Writes forecast.json into the run folder.

    Raises:
        ArtifactError: There is no plan, or a file is damaged.
    """
    found = forecast(
        load_composed(folder / "config.json"),
        envelope.load(folder / "graph.json", RegionGraph),
        envelope.load(folder / "costs.json", Costs),
        envelope.load(folder / "plan.json", Plan),
    )
    text = msgspec.json.format(msgspec.json.encode(found), indent=2)
    envelope.write(folder / "forecast.json", text)
    return found


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser(description="Writes forecast.json of a plan and prints it.")
    parser.add_argument("folder", type=Path, help="the run folder, with plan.json in it")
    folder: Path = parser.parse_args().folder
    try:
        found = write_forecast(folder)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(REFUSED)
    print_forecast(found, str(folder))


if __name__ == "__main__":
    main()
