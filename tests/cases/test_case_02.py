"""Case 2: a plan that needs more memory than there is, is refused before it allocates."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from stages import room
from stages.artifacts.errors import InfeasibleBudgetError
from stages.runtime.stage import require_room
from tests import memory_limit
from tests.cases.commands import ROOT
from tests.solve.planning import plan_of
from tests.solve.synthetic import chain


def test_needed_and_available_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(chain(), 10**12)
    needed = plan.prediction.peak_bytes
    monkeypatch.setattr(room, "most_bytes", lambda held: needed - 1)
    with pytest.raises(InfeasibleBudgetError) as refusal:
        require_room(plan)
    assert str(needed) in str(refusal.value)
    assert str(needed - 1) in str(refusal.value)
    assert refusal.value.key == "budget"
    monkeypatch.setattr(room, "most_bytes", lambda held: needed)
    require_room(plan)


def test_limits_around_this_process_count() -> None:
    assert 0 < room.most_bytes(0) < 1 << 50
    assert all(room.most_bytes(10**15) <= limit for limit, _ in room._cgroups())


@pytest.mark.cgroup
@pytest.mark.slow
def test_gpt2_in_a_cgroup_of_one_gibibyte_is_refused_and_never_killed(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "stages.run", "+model=gpt2", "budget=4GB", "steps=1", "solver=resident"]
    line += [f"hydra.run.dir={tmp_path / 'out'}", f"store={tmp_path}", f"tiers.disk={tmp_path}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = memory_limit.run_limited(line, 2**30, environment=environment, cwd=tmp_path)
    assert done.killed == 0, done.output
    assert done.code == 2, done.output
    assert str(2**30) in done.output
