"""`eval.every`: losses on held-out data are the plain loop's, and training does not notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.artifacts.plan import Plan
from stages.config import DataConfig, EvalConfig, RunConfig
from stages.runtime.data import RowBatches, open_batches
from stages.runtime.stage import run
from stages.solve import stage as solve
from stages.trace import stage as trace
from tests import reference
from tests.models_for_tests import BY_NAME, LENGTH
from tests.parity.harness import LEARNING_RATE, LEAST, SEED, config_of, costs_of, plan_of

MODEL = BY_NAME["gpt2"]
ROWS, STEPS = 2, 5
EVALUATED = EvalConfig(every=2, batches=2)


def text(folder: Path) -> tuple[DataConfig, EvalConfig]:
    folder.mkdir()
    (folder / "train.txt").write_bytes(bytes(i * 7 % 251 for i in range(3000)))
    (folder / "held-out.txt").write_bytes(bytes(i * 11 % 241 for i in range(1000)))
    data = DataConfig(name="text", path=str(folder / "train.txt"), batch_size=ROWS, seq_len=LENGTH)
    return data, replace(EVALUATED, path=str(folder / "held-out.txt"))


def tokens(folder: Path) -> tuple[DataConfig, EvalConfig]:
    folder.mkdir()
    for name, seed in (("train", 1), ("held-out", 2)):
        np.save(folder / f"{name}.npy", np.random.default_rng(seed).integers(0, 250, (9, LENGTH)))
    data = DataConfig(name="tokens", path=str(folder / "train.npy"), batch_size=ROWS, seq_len=LENGTH)
    return data, replace(EVALUATED, path=str(folder / "held-out.npy"))


def same(folder: Path) -> tuple[DataConfig, EvalConfig]:
    """Without a path of its own: the training data's first batches."""
    return text(folder)[0], EVALUATED


def plainly(batches: RowBatches, held_out: RowBatches) -> tuple[list[float], list[float]]:
    """Training losses, and mean losses in evaluation mode."""
    torch.manual_seed(SEED)
    model = MODEL.build()
    optimizer = reference.adamw(lr=LEARNING_RATE)(list(model.parameters()))
    losses, evaluated = [], []
    torch.manual_seed(SEED)
    for step in range(1, STEPS + 1):
        model.train()
        loss = model(**batches.next()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % EVALUATED.every == 0:
            model.eval()
            with torch.no_grad():
                found = [model(**held_out.next()).loss.item() for _ in range(EVALUATED.batches)]
            held_out.seek(0)
            evaluated.append(sum(found) / len(found))
    return losses, evaluated


@pytest.mark.parametrize("made", [text, tokens, same], ids=lambda made: made.__name__)
def test_losses_of_both_kinds_are_the_plain_loops(made: object, tmp_path: Path) -> None:
    assert callable(made)
    data, evaluation = made(tmp_path / "data")
    config = replace(
        config_of(MODEL, "fp32", rows=ROWS, solver=LEAST.solver, disk=tmp_path / "disk"),
        data=data,
        eval=evaluation,
        steps=STEPS,
    )
    graph = trace.run(config)
    evaluated = trace.run(config, "eval")
    costs, costs_evaluated = costs_of(graph, config), costs_of(evaluated, config)
    least = plan_of(replace(config, budget="1"), graph, costs, LEAST)
    plan = planned(config, (graph, costs), (evaluated, costs_evaluated), 2 * least.budget_bytes)
    assert {phase.name for phase in plan.phases} >= {"step", "evaluate"}
    summary, _ = run(config, graph, costs, plan, evaluated)
    batches, held_out = open_batches(config, graph), open_batches(config, graph, evaluation.path or None)
    losses, found = plainly(batches, held_out)
    assert summary.losses == losses
    assert [item["loss"] for item in summary.evaluations] == found
    assert [item["step"] for item in summary.evaluations] == [2, 4]


def planned(config: RunConfig, training: tuple, evaluation: tuple, budget: int) -> Plan:
    """A plan with both phases, at a budget under which training moves things."""
    return solve.run(replace(config, budget=str(budget)), *training, evaluation=evaluation)[0]
