"""Case 15: the report splits compute, each link and the update; the predicted step is near the measured."""

from __future__ import annotations

import re

import pytest

from tests.cases.commands import Finished, run

#: 53 million parameters
_MODEL = ("+model=gpt2", "model.arguments.n_layer=2", "data=random", "data.batch_size=1", "data.seq_len=256")
_PARTS = ("compute", "compute, updates", "read", "write")


def parts_of(report: str) -> dict[str, tuple[str, str]]:
    """Predicted and measured time of each part, as the page's table has them."""
    rows = re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td><td>([^<]*)</td></tr>", report)
    return {name: (predicted, measured) for name, predicted, measured in rows if name in _PARTS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("case")
    refused = run(folder, *_MODEL, "budget=50MB", name="refused")
    assert refused.code == 2, refused.stderr
    budget = refused.record("error.json")["least_feasible_bytes"] * 105 // 100
    done = run(folder, *_MODEL, f"budget={budget}", "steps=6")
    assert done.code == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_report_splits_compute_links_and_updates(finished: Finished) -> None:
    parts = parts_of((finished.folder / "report.html").read_text())
    assert sorted(parts) == sorted(_PARTS)
    for times in parts.values():
        assert all(float(time.removesuffix(" s")) > 0 for time in times)


@pytest.mark.slow
def test_the_predicted_step_is_within_a_quarter_of_the_measured(finished: Finished) -> None:
    """Of the fastest step after the first: what else the machine does only ever adds time."""
    summary = finished.record("summary.json")
    measured = min(summary["step_times_s"][1:])
    assert summary["predicted_step_time_s"] == pytest.approx(measured, rel=0.25)
