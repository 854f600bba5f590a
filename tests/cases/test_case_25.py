"""Case 25: a budget of the predicted peak and 2 % more, 50 steps: never over, and predicted within 5 %."""

from __future__ import annotations

from pathlib import Path

from tests.cases.commands import run

#: wide enough that training holds more than tracing does, so that no other stage sets the peak
_MODEL = ("+model=mlp", "model.arguments.width=600", "data=random", "data.batch_size=2", "data.seq_len=16")
_STEPS = 50


def test_a_budget_two_percent_above_the_prediction_holds_for_fifty_steps(tmp_path: Path) -> None:
    ample = run(tmp_path, *_MODEL, "steps=1", "budget=4GB", name="ample")
    assert ample.code == 0, ample.stderr
    budget = ample.record("summary.json")["predicted_peak_bytes"] * 102 // 100
    tight = run(tmp_path, *_MODEL, f"steps={_STEPS}", f"budget={budget}", name="tight")
    assert tight.code == 0, tight.stderr
    summary = tight.record("summary.json")
    assert len(summary["step_peak_bytes"]) == _STEPS
    assert max(summary["step_peak_bytes"]) <= budget
    assert summary["peak_bytes"] <= budget
    measured, predicted = summary["peak_bytes_by_stage"]["runtime"], summary["predicted_peak_bytes"]
    assert predicted <= budget
    assert abs(measured / predicted - 1) <= 0.05
