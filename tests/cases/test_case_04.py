"""Case 4: a model of 400 MB within 150 MB more than the process itself needs."""

from __future__ import annotations

from pathlib import Path

from tests.cases.commands import Finished, run

ROOM_BYTES = 150 * 10**6
STEPS = 2

#: 25 layers of 4 million parameters: 1.6 GB with gradients and optimizer state
MODEL = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, layers=25, width=2000):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, input_ids, labels):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (x.mean(-1) - labels / 256).square().mean()
"""


def train(folder: Path, budget_bytes: int, name: str) -> Finished:
    return run(
        folder,
        "model=module",
        "model.target=wide_model.Wide",
        f"budget={budget_bytes}",
        f"steps={STEPS}",
        "data=random",
        "data.batch_size=1",
        "data.seq_len=16",
        name=name,
    )


def check(done: Finished, budget_bytes: int) -> None:
    assert done.code == 0, done.stdout + done.stderr
    summary = done.record("summary.json")
    assert summary["budget_bytes"] == budget_bytes
    assert summary["peak_bytes"] <= budget_bytes
    assert len(summary["losses"]) == STEPS
    assert len(summary["step_peak_bytes"]) == STEPS
    assert max(summary["step_peak_bytes"]) <= budget_bytes


def test_no_step_exceeds_the_budget_or_the_least_one_is_named_and_works(tmp_path: Path) -> None:
    (tmp_path / "wide_model.py").write_text(MODEL)
    refused = train(tmp_path, 10**8, "refused")
    assert refused.code == 2, refused.stdout + refused.stderr
    error = refused.record("error.json")
    assert error["kind"] == "infeasible_budget"
    least = error["least_feasible_bytes"]
    assert str(least) in refused.stderr
    wanted = refused.record("costs.json")["content"]["baseline_bytes"] + ROOM_BYTES
    if wanted < least:  # then that is what must be said, and what is said must be true
        again = train(tmp_path, wanted, "wanted")
        assert again.code == 2, again.stdout + again.stderr
        assert again.record("error.json")["least_feasible_bytes"] == least
    budget = max(wanted, least)
    check(train(tmp_path, budget, "trained"), budget)
