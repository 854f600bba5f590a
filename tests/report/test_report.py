"""The report says what the artifacts say, is one file, and needs neither torch nor the network."""

from __future__ import annotations

import csv
import io
import math
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from stages.artifacts import envelope
from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import Placement, Plan, Prediction, RegionPlacement
from stages.artifacts.summary import Summary
from stages.artifacts.timeline import Event, Timeline, to_chrome_trace
from stages.report.files import losses_csv, write_report
from stages.report.page import render, shown_timelines
from stages.report.record import read_run
from stages.report.terminal import print_summary

TIMELINES = [
    Timeline(
        "predicted", 0, [Event("compute", "forward", 0, 10**9), Event("read", "w", 0, 10**8, 5)], [(0, 9)]
    ),
    Timeline("measured", 1, [Event("compute", "forward", 0, 3 * 10**9)]),
    Timeline("measured", 2, [Event("compute", "forward", 1, 2 * 10**9 + 1), Event("write", "w", 0, 7, 8)]),
]


def summary(**changes: object) -> Summary:
    base = Summary(
        model="<tiny> & co",
        device="cpu",
        precision="fp32",
        solver="greedy_async",
        optimizer_implementation="fused_adamw",
        threads=2,
        allocator="page pool",
        versions={"torch": "2.13.0"},
        steps=3,
        budget_bytes=10**9,
        peak_bytes=8 * 10**8,
        peak_bytes_by_stage={"trace": 3 * 10**8, "runtime": 8 * 10**8},
        predicted_peak_bytes=81 * 10**7,
        baseline_bytes=2 * 10**8,
        least_feasible_bytes=5 * 10**8,
        step_time_s=1.5,
        predicted_step_time_s=1.4,
        lower_bound_step_time_s=None,
        optimality_gap=None,
        solve_time_s=0.1,
        tokens_per_s=100.0,
        micro_batches=1,
        losses=[10.0, 0.1 + 0.2, 1 / 3],
        grad_norms=[1.5, None, 2.5],
        skipped_steps=[2],
        moved_bytes_per_step={"disk_read": 123 * 10**6, "disk_write": 0},
        placement={"weights": {"resident": 1, "streamed": 1}},
        step_peak_bytes=[7 * 10**8, 8 * 10**8, 8 * 10**8],
    )
    return msgspec.structs.replace(base, **changes)


def plan() -> Plan:
    regions = [RegionPlacement("resident", "keep"), RegionPlacement("streamed", "recompute")]
    placement = Placement(regions, {}, "consume", {}, 1024, [0, 1])
    prediction = Prediction(81 * 10**7, 14 * 10**8, 5 * 10**8, {})
    return Plan(
        "greedy_async", 10**9, "cpu", "fp32", "fused_adamw", placement, [], [], 0, 0, 0, 0, prediction, 1
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    envelope.write_atomically(tmp_path / "summary.json", msgspec.json.encode(summary()))
    envelope.save(tmp_path / "plan.json", plan())
    envelope.write_atomically(tmp_path / "timeline.json", msgspec.json.encode(to_chrome_trace(TIMELINES)))
    return tmp_path


def test_a_run_folder_reads_back_as_it_was_written(folder: Path) -> None:
    run = read_run(folder)
    assert run.summary == summary()
    assert run.plan == plan()
    assert [(one.source, one.step, one.memory) for one in run.timelines] == [
        (one.source, one.step, one.memory) for one in TIMELINES
    ]
    assert [sorted(map(str, one.events)) for one in run.timelines] == [
        sorted(map(str, one.events)) for one in TIMELINES
    ]


def test_losses_round_trip_exactly(folder: Path) -> None:
    write_report(folder)
    rows = list(csv.DictReader(io.StringIO((folder / "losses.csv").read_text())))
    assert [float(row["loss"]) for row in rows] == summary().losses
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["grad_norm"] for row in rows] == ["1.5", "", "2.5"]
    assert [row["skipped"] for row in rows] == ["0", "1", "0"]


def test_the_page_refers_to_nothing_outside_itself(folder: Path) -> None:
    write_report(folder)
    page = (folder / "report.html").read_text()
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"|<metadata>.*?</metadata>', "", page, flags=re.DOTALL)
    assert "http" not in without_namespaces
    assert "<script" not in page
    assert not re.search(r'(src|href)="(?!#|data:)', without_namespaces)


def test_the_page_says_what_the_artifacts_say(folder: Path) -> None:
    page = render(read_run(folder))
    assert "&lt;tiny&gt; &amp; co" in page
    assert page.count("<svg") == 3
    for said in ("800.0MB", "1000.0MB", "500.0MB", "123.0MB", "1.500 s", "recompute", "predicted compute"):
        assert said in page, said
    assert "<td>compute</td><td>1.000 s</td><td>2.000 s</td>" in page
    assert "<td>read</td><td>0.100 s</td><td>none</td>" in page


def test_the_same_run_gives_the_same_page(folder: Path) -> None:
    run = read_run(folder)
    assert render(run) == render(run)


def test_prediction_and_last_step_are_shown() -> None:
    assert [(one.source, one.step) for one in shown_timelines(TIMELINES)] == [
        ("predicted", 0),
        ("measured", 2),
    ]
    assert shown_timelines([]) == []


def test_a_loss_that_is_not_finite_is_reported_not_hidden(folder: Path) -> None:
    lost = summary(losses=[10.0, math.nan, math.inf])
    (folder / "summary.json").write_bytes(msgspec.json.encode(lost))
    run = write_report(folder)
    assert math.isnan(run.summary.losses[1])
    assert losses_csv(lost).splitlines()[2].startswith("2,nan")


@pytest.mark.parametrize("name", ["summary.json", "plan.json", "timeline.json"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"traceEvents": [{}]}', b"{}"])
def test_missing_or_damaged_files_are_refused(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=name.replace(".", r"\.")):
        read_run(folder)


def test_the_terminal_shows_peak_against_budget() -> None:
    text = io.StringIO()
    print_summary(summary(), "out", Console(file=text, width=100))
    assert "800.0MB of 1000.0MB" in text.getvalue()
    assert "out/report.html" in text.getvalue()


def test_reporting_imports_no_torch() -> None:
    code = "import sys, stages.report.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
