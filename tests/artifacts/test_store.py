"""Keys change when, and only when, something that counts has changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts import envelope
from stages.artifacts.costs import LinkCost
from stages.artifacts.errors import ArtifactError, StorageError
from stages.artifacts.store import Store, default_folder, describe_files, hash_files, key_of
from stages.artifacts.timeline import Event, Timeline
from tests.sealed import sealed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_key_does_not_depend_on_the_order_of_its_parts(parts: dict[str, object]) -> None:
    assert key_of(parts) == key_of(dict(reversed(parts.items())))


@given(st.dictionaries(st.text(), JSON, max_size=3), st.dictionaries(st.text(), JSON, max_size=3))
def test_different_parts_have_different_keys(one: dict[str, object], other: dict[str, object]) -> None:
    assert (key_of(one) == key_of(other)) == (
        one == other and repr(sorted(one.items())) == repr(sorted(other.items()))
    )


def test_hash_of_files_sees_content_and_names_not_their_order(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1")
    two.write_text("y = 2")
    before = hash_files([one, two])
    assert hash_files([two, one]) == before
    two.write_text("y = 3")
    assert hash_files([one, two]) != before
    two.write_text("y = 2")
    assert hash_files([one, two]) == before
    two.rename(tmp_path / "c.py")
    assert hash_files([one, tmp_path / "c.py"]) != before


def test_hash_of_files_refuses_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"missing\.py"):
        hash_files([tmp_path / "missing.py"])


def test_replaced_weights_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"12345678")
    before = describe_files(tmp_path)
    os.utime(file, ns=(1, 1))
    assert describe_files(tmp_path) != before


def test_the_store_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "stages"
    assert Store().folder.is_relative_to(tmp_path)


def test_a_store_that_cannot_be_made_is_refused_naming_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError) as caught:
        Store(tmp_path / "file" / "store")
    assert caught.value.key == "store"


def test_the_store_holds_a_result_only_when_all_its_artifacts_are_there(tmp_path: Path) -> None:
    store = Store(tmp_path)
    envelope.save(store.path("solve", "k", "timeline"), Timeline("predicted", 0, []))
    assert store.holds("solve", "k", ["timeline"])
    assert not store.holds("solve", "k", ["plan", "timeline"])


WRITER = """
import sys
from pathlib import Path
from stages.artifacts import envelope
from stages.artifacts.timeline import Event, Timeline
timeline = Timeline("predicted", 0, [Event("compute", f"e{i}", i, i + 1) for i in range(2000)])
for _ in range(40):
    envelope.save(Path(sys.argv[1]), timeline)
"""


def test_writers_at_once_never_show_a_reader_half_an_artifact(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    envelope.save(path, Timeline("predicted", 0, []))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        assert len(envelope.load(path, Timeline).events) in (0, 2000)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["timeline.json"]


TIMELINE = {"kind": "timeline", "schema_version": 1, "inputs": {}, "provenance": {}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"kind":"plan","schema_version":1,"inputs":{},"provenance":{},"content":{}}',
        b'{"kind":"timeline","schema_version":99,"inputs":{},"provenance":{},"content":{}}',
        b'{"kind":"timeline","schema_version":1,"inputs":{},"provenance":{},"content":{"source":"x"}}',
        sealed({**TIMELINE, "content": {"source": "x", "step": 0, "events": [], "surprise": 1}}),
        sealed({**TIMELINE, "content": {"source": "x", "step": 0.5, "events": []}}),
        sealed({**TIMELINE, "content": {"source": "x", "step": 0, "events": []}}).replace(b"0", b"1", 1),
    ],
)
def test_damaged_and_crafted_artifacts_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "timeline.json"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"timeline\.json"):
        envelope.load(path, Timeline)


def test_a_record_that_is_no_artifact_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="LinkCost"):
        envelope.save(tmp_path / "x.json", LinkCost("disk_read", 1, 1, 1))


def test_provenance_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    provenance = envelope.Provenance(key="k", versions={"torch": "x"}, peak_bytes=7)
    timeline = Timeline("measured", 3, [Event("read", "r", 0, 5, 6)], [(0, 1)])
    envelope.save(path, timeline, provenance=provenance)
    assert envelope.load_with_provenance(path, Timeline) == (timeline, provenance)
