"""The benchmark of predictions judges what it is given, and shows all of it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks import prediction, prediction_cases
from benchmarks.prediction_cases import Case, Run, cases
from benchmarks.prediction_table import COLUMNS, as_markdown, judge, rows_of
from benchmarks.timelines import by_class
from stages.artifacts.envelope import Provenance
from stages.artifacts.timeline import Event, Timeline

FINE = Run(
    case="gpt2 fp32 1x512",
    budget_bytes=1000,
    repeat=0,
    peak_bytes=990,
    runtime_peak_bytes=980,
    predicted_peak_bytes=975,
    least_feasible_bytes=500,
    step_times_s=[9.0, 1.0, 1.2],
    predicted_step_time_s=1.1,
    moved_bytes=5,
    others_share=0.01,
)


def changed(**fields: object) -> Run:
    return msgspec.structs.replace(FINE, **fields)


def judged(*runs: Run):
    return judge(rows_of(runs), least_rows=1)


def test_repeats_make_one_row_without_first_steps() -> None:
    rows = rows_of([FINE, changed(repeat=1, step_times_s=[8.0, 1.4, 1.6], runtime_peak_bytes=985)])
    assert len(rows) == 1
    assert rows[0].step_times_s == [1.0, 1.2, 1.4, 1.6]
    assert rows[0].measured_step_s == pytest.approx(1.3)
    assert rows[0].measured_peak_bytes == 985


def test_good_runs_meet_every_criterion() -> None:
    assert judged(FINE).met


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"runtime_peak_bytes": 920}, "within 5%"),
        ({"runtime_peak_bytes": 1030, "predicted_peak_bytes": 975}, "within 5%"),
        ({"peak_bytes": 1001}, "inside the budget"),
        ({"predicted_step_time_s": 0.92}, "step time"),
        ({"predicted_step_time_s": 1.3}, "step time"),
    ],
)
def test_each_criterion_can_fail_alone(fields: dict[str, object], word: str) -> None:
    criteria = judged(changed(**fields))
    assert not criteria.met
    failed = [line for line in criteria.lines if line.startswith("NOT MET")]
    assert len(failed) == 1
    assert word in failed[0]


def test_a_tenth_of_the_times_may_be_off_but_no_more() -> None:
    runs = [changed(budget_bytes=1000 + index) for index in range(9)]
    slow = [changed(budget_bytes=2000 + index, predicted_step_time_s=5.0) for index in range(2)]
    assert judged(*runs, slow[0]).met
    assert not judged(*runs, *slow).met


def test_too_few_runs_do_not_pass() -> None:
    assert not judge(rows_of([FINE]), least_rows=24).met


def test_the_page_has_a_line_for_each_row_and_no_path() -> None:
    rows = rows_of([FINE, changed(budget_bytes=2000)])
    page = as_markdown(rows, judge(rows, least_rows=1))
    lines = [line for line in page.splitlines() if line.startswith("| gpt2")]
    assert len(lines) == 2
    assert all(line.count("|") == len(COLUMNS) + 1 for line in lines)
    assert str(Path.home()) not in page


def test_the_short_list_has_every_model_and_precision_and_both_sizes_of_each() -> None:
    models, precisions = ["gpt2", "bert", "t5"], ["fp32", "bf16"]
    short = cases(models, precisions, [1, 4], full=False)
    assert {(case.model, case.precision) for case in short} == {(m, p) for m in models for p in precisions}
    for precision in precisions:
        assert {case.batch_size for case in short if case.precision == precision} == {1, 4}
    for model in models:
        assert {case.batch_size for case in short if case.model == model} == {1, 4}
    assert len(cases(models, precisions, [1, 4], full=True)) == 12


def test_an_interrupted_benchmark_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run(case: Case, budget: int, repeat: int, steps: int, work: Path) -> Run:
        ran.append((budget, repeat))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return changed(case=case.name, budget_bytes=budget, repeat=repeat, peak_bytes=budget)

    monkeypatch.setattr(prediction, "run", run)
    monkeypatch.setattr(prediction, "budgets_of", lambda case, work: [1000, 2000])
    with pytest.raises(KeyboardInterrupt):
        prediction.main(["--quick", "--work", str(tmp_path)])
    assert ran == [(1000, 0), (2000, 0), (1000, 1)]  # all budgets before any is repeated
    assert prediction.main(["--quick", "--resume", "--work", str(tmp_path)]) == 0
    assert ran[3:] == [(1000, 1), (2000, 1)]


def test_disturbed_runs_are_repeated_and_the_quietest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([0.5, 0.02])

    def run(case: Case, budget: int, repeat: int, steps: int, work: Path) -> Run:
        share = next(shares)
        return changed(
            case=case.name, budget_bytes=budget, others_share=share, step_times_s=[9.0, 1.0 + share]
        )

    monkeypatch.setattr(prediction, "run", run)
    monkeypatch.setattr(prediction, "budgets_of", lambda case, work: [1000])
    assert prediction.main(["--quick", "--repeats", "1", "--work", str(tmp_path)]) == 0
    found = [
        msgspec.json.decode(line, type=Run)
        for line in (tmp_path / "runs.jsonl").read_bytes().split(b"\n")
        if line
    ]
    assert [one.step_times_s for one in found] == [[9.0, 1.02]]


def test_classes_tell_kinds_updates_and_links_apart() -> None:
    events = [
        Event("compute", "forward a", 0, 10**6),
        Event("compute", "update w[0:5]", 2 * 10**6, 3 * 10**6),
        Event("read", "read exp_avg w", 0, 4 * 10**6, 7),
        Event("write", "write saved a", 0, 10**6, 9),
    ]
    shares = by_class(Timeline("measured", 1, events), {"a": 3})
    assert shares["forward kind 3"].ms == 1
    assert shares["update"].ms == 1
    assert (shares["read state"].ms, shares["read state"].bytes) == (4, 7)
    assert shares["write saved"].bytes == 9
    assert shares["compute waits"].ms == 2
    assert shares["step"].ms == 4


def test_a_disturbed_profile_is_thrown_away_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "store" / "profile" / "key"
    shares, thrown = iter([0.5, 0.01]), []

    def command(module: str, *details: object) -> prediction_cases._Done:
        thrown.append(not kept.exists())
        kept.mkdir(parents=True, exist_ok=True)
        return prediction_cases._Done("", next(shares))

    monkeypatch.setattr(prediction_cases, "_command", command)
    found = (None, Provenance(key="key"))
    monkeypatch.setattr(prediction_cases.envelope, "load_with_provenance", lambda path, record: found)
    prediction_cases._profile(Case("gpt2", "fp32", 1), tmp_path / "plan", tmp_path)
    assert thrown == [True, True]
    assert kept.exists()
