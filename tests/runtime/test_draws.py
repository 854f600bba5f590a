"""Random numbers of a forward out of turn are those of its turn in a plain loop, or the run stops."""

from __future__ import annotations

import itertools

import pytest
import torch

from stages.artifacts.errors import StageError
from stages.device.cpu import Cpu
from stages.runtime.draws import drawing, rehearse
from stages.runtime.state import Draws, MicroBatch
from tests.models_for_tests import BY_NAME
from tests.parity.harness import traced


def test_a_rehearsal_leaves_the_generator_where_the_forwards_do() -> None:
    graph, _ = traced(BY_NAME["gpt2"], "fp32", 2)
    torch.manual_seed(0)
    sizes = {"batch": 2, "seq": 32}
    batches = [
        MicroBatch({}, sizes),
        MicroBatch({}, {**sizes, "batch": 0}, empty=True),
        MicroBatch({}, sizes),
    ]
    found = rehearse(graph, batches, Cpu())
    assert {number for number, _ in found} == {0, 2}
    turns = sorted(found)
    for first, second in itertools.pairwise(turns):
        assert torch.equal(found[first].after, found[second].before)
    assert torch.equal(found[turns[-1]].after, torch.get_rng_state())


def test_a_forward_that_draws_otherwise_stops_the_run() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    torch.rand(3)
    after = torch.get_rng_state()
    with drawing(Draws(before, after), "layer", Cpu()):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), after)
    with (
        pytest.raises(StageError, match="region layer drew other"),
        drawing(Draws(before, after), "layer", Cpu()),
    ):
        torch.rand(4)
    assert torch.equal(torch.get_rng_state(), after)
