"""Scratch folders: private, removed at every kind of end, and never a living process's."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stages.artifacts.errors import StorageError
from stages.runtime import scratch
from stages.runtime.scratch import ScratchFolder

#: makes a scratch folder with a file in it, says where, and waits to be ended
HOLDER = (
    "import pathlib, signal, sys\n"
    "from stages.runtime.scratch import ScratchFolder\n"
    "scratch = ScratchFolder(pathlib.Path(sys.argv[1]))\n"
    "(scratch.path / 'data').write_bytes(b'x' * 100)\n"
    "print(scratch.path, flush=True)\n"
)


def start_holder(root: Path, then: str = "signal.pause()\n") -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER + then, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    return child, Path(child.stdout.readline().strip())


def test_the_folder_is_private_and_goes_with_the_context(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as made:
        assert made.parent == tmp_path
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        (made / "data").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    folder = ScratchFolder(tmp_path)
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), ScratchFolder(tmp_path):
        raise RuntimeError("broken")
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_have_different_folders_and_spare_each_other(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path) as one, ScratchFolder(tmp_path) as other:
        assert one != other
        assert one.is_dir()
        assert other.is_dir()


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    child, left = start_holder(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.wait(timeout=30)
    assert (left / "data").exists()
    with ScratchFolder(tmp_path) as made:
        assert not left.exists()
        assert sorted(tmp_path.iterdir()) == sorted([made, made.with_name(made.name + ".lock")])


def test_a_living_process_keeps_its_folder(tmp_path: Path) -> None:
    child, held = start_holder(tmp_path)
    try:
        with ScratchFolder(tmp_path):
            assert (held / "data").read_bytes() == b"x" * 100
    finally:
        child.kill()
        child.wait(timeout=30)


def test_a_folder_is_removed_at_exit_without_being_closed(tmp_path: Path) -> None:
    child, left = start_holder(tmp_path, then="")
    child.wait(timeout=30)
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_termination_turned_into_an_exception_leaves_nothing(tmp_path: Path) -> None:
    then = (
        "def end(number, frame): raise KeyboardInterrupt\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "signal.pause()\n"
    )
    child, left = start_holder(tmp_path, then)
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    child.terminate()
    child.wait(timeout=30)
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_the_users_own_files_with_similar_names_are_left_alone(tmp_path: Path) -> None:
    own = [tmp_path / "stages-scratch-1-00000000", tmp_path / "stages-scratch-mine", tmp_path / "other"]
    for folder in own:
        folder.mkdir()
    (tmp_path / "other.lock").touch()
    (tmp_path / "stages-scratch-mine.lock").touch()
    with ScratchFolder(tmp_path):
        pass
    assert all(folder.is_dir() for folder in own)
    assert (tmp_path / "other.lock").exists()
    assert (tmp_path / "stages-scratch-mine.lock").exists()


def test_a_link_planted_as_a_lock_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "root"
    root.mkdir()
    (root / "stages-scratch-1-00000000.lock").symlink_to(victim)
    with pytest.warns(RuntimeWarning, match="remove it by hand"), ScratchFolder(root):
        pass
    assert victim.read_text() == "mine"


def test_a_lock_without_its_folder_is_removed_too(tmp_path: Path) -> None:
    lock = tmp_path / "stages-scratch-1-00000000.lock"
    lock.touch()
    with ScratchFolder(tmp_path):
        assert not lock.exists()


def test_missing_folders_are_made(tmp_path: Path) -> None:
    with ScratchFolder(tmp_path / "a" / "b") as made:
        assert made.is_dir()


def test_a_file_in_the_way_is_a_storage_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StorageError, match="Give a writable folder") as refusal:
        ScratchFolder(file)
    assert refusal.value.key == "tiers.disk"


def test_a_folder_without_permission_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, *_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(scratch.os, "open", refuse)
    with pytest.raises(StorageError, match="Permission denied"):
        ScratchFolder(tmp_path)


def test_a_folder_that_cannot_be_made_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        if self != tmp_path:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match="No space left"):
        ScratchFolder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_locks_are_not_inherited_by_programs_that_are_started(tmp_path: Path) -> None:
    """Else a child that outlives a killed run would keep its folder for ever."""
    folder = ScratchFolder(tmp_path)
    assert not os.get_inheritable(folder._lock)
    folder.close()
