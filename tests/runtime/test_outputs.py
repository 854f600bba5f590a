"""`Session.forward`: what the model returns, in its own structure, bitwise eager's."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from stages.api import Prepared, Session
from stages.artifacts.errors import ConfigError
from stages.artifacts.plan import Plan
from stages.solve.verifier import PlanError, verify
from stages.trace.structure import tensors_in
from tests import reference
from tests.cases.sessions import LEARNING_RATE, SEED, frugal, placed, prepared, prepared_small, seeded
from tests.models_for_tests import BY_NAME

Pair = namedtuple("Pair", ["scaled", "loss"])


@dataclass
class Result:
    loss: Tensor
    parts: dict[str, Any]


class Nested(nn.Module):
    """Returns an early value, views, its own input, a view of a weight, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Result:
        early = self.first(x).relu()
        late = self.second(early)
        loss = late.square().mean()
        parts = {
            "early": early, "views": [late[:, :2], (late.t(), "a word", None, 3)],
            "given": x, "pair": Pair(scaled=late * 2, loss=loss), "weight": self.first.weight.t(),
        }  # fmt: skip
        return Result(loss, parts)


def evaluated(model: nn.Module, batch: Any) -> Any:
    model.eval()
    with torch.no_grad():
        output = reference.call(model, batch)
    model.train()
    return output


def assert_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    pairs = zip(tensors_in(found), tensors_in(expected), strict=True)
    for (path, tensor), (expected_path, expected_tensor) in pairs:
        assert path == expected_path
        assert torch.equal(tensor, expected_tensor), path


def trained(model: nn.Module, batches: list[Any]) -> nn.Module:
    optimizer = reference.adamw(lr=LEARNING_RATE)(list(model.parameters()))
    torch.manual_seed(SEED)
    for batch in batches:
        reference.loss_of(reference.call(model, batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "conv_bn"])
def test_outputs_are_eagers_in_its_structure_before_and_after_steps(
    name: str, lane: str, tmp_path: Path
) -> None:
    model = BY_NAME[name]
    batches = model.batches(3)
    before = prepared_small(name, tmp_path, lane, outputs=True)
    plain = seeded(model.build)
    if hasattr(plain, "config"):
        plain.config.use_cache = False
    with Session(seeded(model.build), before, frugal(before)) as session:
        first = session.forward(batches[2])
        assert not any(tensor.requires_grad for _, tensor in tensors_in(first))
        assert_equal(first, evaluated(plain, batches[2]))
        torch.manual_seed(SEED)
        for batch in batches[:2]:
            session.step(batch)
        kept = evaluated(plain, batches[2])
        assert_equal(first, kept)  # nothing of it lay in memory of the plan
        trained(plain, batches[:2])
        expected = evaluated(plain, batches[2])
        assert_equal(session.forward(batches[2]), expected)
        assert session.evaluate(batches[2]) == reference.loss_of(expected).item()


def nested(disk: Path, lane: str) -> tuple[Prepared, Tensor]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    return placed(prepared(seeded(Nested), (x,), outputs=True), disk, lane), x


@pytest.mark.parametrize("lane", ["cpu", "adversarial"])
def test_nested_outputs_inputs_views_and_what_is_no_tensor(tmp_path: Path, lane: str) -> None:
    before, x = nested(tmp_path, lane)
    with Session(seeded(Nested), before, frugal(before)) as session:
        for rows in (x, x[:3]):  # a smaller batch too
            found, expected = session.forward((rows,)), evaluated(seeded(Nested), (rows,))
            assert_equal(found, expected)
            assert type(found.parts["pair"]) is Pair
            assert found.parts["views"][1][1:] == ("a word", None, 3)


def test_a_plan_that_lets_go_of_an_output_too_early_is_refused(tmp_path: Path) -> None:
    before = prepared_small("t5", tmp_path, outputs=True)
    plan = frugal(before)
    assert before.evaluation is not None
    verify(plan, before.graph, before.costs, evaluation=before.evaluation)
    with pytest.raises(PlanError, match="which the model returns"):
        verify(_early(plan, before), before.graph, before.costs, evaluation=before.evaluation)


def _early(plan: Plan, before: Prepared) -> Plan:
    """The encoder's output goes with the region before the last, none of which reads it."""
    assert before.evaluation is not None
    graph = before.evaluation[0]
    [name] = [spec.name for spec in graph.outputs if spec.path == ["encoder_last_hidden_state"]]
    [phase] = [phase for phase in plan.phases if phase.name == "evaluate"]
    buffers = {buffer.id for buffer in plan.buffers if buffer.owner == name}
    runs = [item for item in phase.instructions if item.operation == "evaluate"]
    [buffer] = buffers & set(runs[-1].frees)
    changed = {
        runs[-1].id: [freed for freed in runs[-1].frees if freed != buffer],
        runs[-2].id: [*runs[-2].frees, buffer],
    }
    instructions = [
        msgspec.structs.replace(item, frees=changed.get(item.id, item.frees)) for item in phase.instructions
    ]
    phases = [
        msgspec.structs.replace(phase, instructions=instructions) if other is phase else other
        for other in plan.phases
    ]
    return msgspec.structs.replace(plan, phases=phases)


def test_a_session_without_outputs_says_how_to_get_them(tmp_path: Path) -> None:
    built, batch = seeded(BY_NAME["mlp"].build), BY_NAME["mlp"].batches(1)[0]
    before = prepared_small("mlp", tmp_path)
    with Session(built, before, frugal(before)) as session, pytest.raises(ConfigError, match="outputs=True"):
        session.forward(batch)
