"""Going on where the newest checkpoint is damaged, a process was killed, or the precision is another."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stages.artifacts.errors import ArtifactError
from stages.config import CheckpointConfig
from stages.runtime.checkpoint.leftovers import clear_away, held
from stages.runtime.stage import Surroundings
from tests.parity.harness import LEAST, RESIDENT
from tests.runtime.sessions_on_disk import Job


@pytest.fixture
def saved(tmp_path: Path) -> Job:
    job = Job("mlp", "fp32", tmp_path)
    job.run(LEAST, Surroundings(tmp_path), steps=6, checkpoint=CheckpointConfig(every=2, keep=3))
    return job


@pytest.mark.parametrize("damage", ["content", "manifest", "empty"])
def test_a_damaged_newest_one_is_named_and_the_next_older_used(
    saved: Job, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    expected, _ = saved.run(steps=7)
    newest = saved.folder / "checkpoints" / "step-6"
    [file] = newest.glob("*.safetensors")
    if damage == "content":
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    elif damage == "manifest":
        (newest / "checkpoint.json").write_text("{}")
    else:
        for path in newest.iterdir():
            path.unlink()
    summary, _ = saved.run(steps=7, resume=str(saved.folder / "checkpoints"))
    assert summary.resumed_at == 4
    assert summary.losses == expected.losses
    said = capsys.readouterr().err
    assert f"{newest} cannot be used" in said
    assert "going on from the older" in said


def test_where_none_is_whole_the_newest_ones_error_is_raised(saved: Job) -> None:
    for folder in (saved.folder / "checkpoints").iterdir():
        (folder / "checkpoint.json").write_text("{}")
    with pytest.raises(ArtifactError, match="step-6"):
        saved.run(steps=7, resume=str(saved.folder / "checkpoints"))


def test_a_run_that_was_ended_after_its_last_step_only_exports(saved: Job) -> None:
    expected, weights = saved.run(steps=6)
    summary, found = saved.run(steps=6, resume=str(saved.folder / "checkpoints"))
    assert summary.losses == expected.losses
    assert summary.resumed_at == 6
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


KILLED = """
import os, sys
from pathlib import Path
from stages.runtime.checkpoint import leftovers
with leftovers.held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    living, dead, old, other = (
        tmp_path / name for name in (".step-3.1.part", ".step-4.1.part", ".step-5.1.old", "mine")
    )
    for path in (living, dead, old, other):
        path.mkdir()
    line = [sys.executable, "-c", KILLED, str(living)]
    holder = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdin is not None
    holder.stdout.readline()
    clear_away(tmp_path)
    # its successor never came, so what was to be replaced is the checkpoint of its step
    assert sorted(path.name for path in tmp_path.iterdir()) == [living.name, "mine", "step-5"]
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    clear_away(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "step-5"]


def test_what_was_replaced_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-5.1.old").mkdir()
    (tmp_path / "step-5").mkdir()
    clear_away(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-5"]


def test_a_folder_is_held_by_one_only(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(BlockingIOError), held(tmp_path):
        pass


@pytest.mark.parametrize("kill_before", ["first rename", "second rename"])
def test_a_process_killed_while_it_replaces_a_checkpoint_loses_none(
    saved: Job, monkeypatch: pytest.MonkeyPatch, kill_before: str
) -> None:
    """The step is made again, as after going on from an older checkpoint."""
    checkpoints = saved.folder / "checkpoints"
    for step in (2, 4):
        shutil.rmtree(checkpoints / f"step-{step}")
    pid = os.fork()
    if pid == 0:
        left = 1 if kill_before == "first rename" else 2
        rename = Path.rename

        def killed(path: Path, target: Path) -> Path:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), 9)
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", killed)
        saved.run(LEAST, Surroundings(saved.folder), steps=6, checkpoint=CheckpointConfig(every=6, keep=1))
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 9
    summary, _ = saved.run(steps=7, resume=str(checkpoints))
    assert summary.resumed_at == 6
    assert [path.name for path in checkpoints.iterdir()] == ["step-6"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_another_precision_goes_on_from_the_full_values(tmp_path: Path, precision: str) -> None:
    every = CheckpointConfig(every=3)
    whole, rounded = (Job("gpt2", name, tmp_path / name) for name in ("fp32", precision))
    _, weights = whole.run(LEAST, Surroundings(whole.folder), steps=3, checkpoint=every)
    first = str(whole.folder / "checkpoints")

    _, cast = rounded.run(RESIDENT, Surroundings(rounded.folder), steps=3, resume=first)
    for name, tensor in weights.items():
        assert torch.equal(cast[name], tensor.to(cast[name].dtype)), name

    losses = [rounded.run(variant, steps=6, resume=first)[0].losses for variant in (RESIDENT, LEAST)]
    assert losses[0] == losses[1]

    surroundings = Surroundings(rounded.folder)
    rounded.run(LEAST, surroundings, steps=6, resume=first, checkpoint=every)
    second = str(rounded.folder / "checkpoints")
    _, back = whole.run(RESIDENT, steps=6, resume=second)
    _, cast = rounded.run(RESIDENT, steps=6, resume=second)
    assert any(not torch.equal(back[name], cast[name].float()) for name in back), "rounded on the way"
    for name, tensor in back.items():
        assert torch.equal(tensor.to(cast[name].dtype), cast[name]), name
