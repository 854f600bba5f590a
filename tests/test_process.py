"""Stage processes: what they are told, what they report, how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from stages import process
from stages.artifacts import envelope
from stages.artifacts.errors import ArtifactError
from stages.artifacts.plan import Plan
from stages.artifacts.timeline import Timeline
from stages.config import DeviceConfig, RunConfig, save_composed

STAGE = """
import sys
from stages.process import stage_main
from stages.artifacts.errors import StorageError
from stages.artifacts.timeline import Timeline

def work(order):
    {body}

stage_main("trace", work)
"""


def run_stage(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    save_composed(RunConfig(budget="1GB"), folder / "config.json")
    script = folder / "stage.py"
    script.write_text(STAGE.format(body=body))
    line = [sys.executable, str(script), "--composed", str(folder / "config.json"), "--run-dir", str(folder)]
    line += ["--out", f"timeline={folder}/timeline.json", "--key", "abc"]
    return subprocess.run(line, env=environment(), capture_output=True, text=True, check=False)


def environment(**more: str) -> dict[str, str]:
    root = str(Path(process.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, **more}


def test_a_stage_leaves_its_artifact_with_key_versions_and_peak(tmp_path: Path) -> None:
    done = run_stage(tmp_path, "block = bytearray(50_000_000); order.save(Timeline('predicted', 0, []))")
    assert done.returncode == 0, done.stderr
    artifact, provenance = envelope.load_with_provenance(tmp_path / "timeline.json", Timeline)
    assert artifact.source == "predicted"
    assert provenance.key == "abc"
    assert "torch" in provenance.versions
    assert 50_000_000 < provenance.peak_bytes < 200_000_000


def test_a_refusal_exits_2_with_one_message_and_error_json(tmp_path: Path) -> None:
    done = run_stage(tmp_path, "raise StorageError('the disk is full', key='tiers.disk')")
    assert (done.returncode, done.stderr) == (2, "error: the disk is full\n")
    assert '"key": "tiers.disk"' in (tmp_path / "error.json").read_text()


def test_a_crash_shows_its_traceback_and_leaves_type_file_and_line(tmp_path: Path) -> None:
    done = run_stage(tmp_path, "{}['nothing']")
    assert done.returncode == 1
    assert "KeyError: 'nothing'" in done.stderr
    record = (tmp_path / "error.json").read_text()
    assert "KeyError" in record
    assert "stage.py:8" in record


def test_a_missing_input_is_refused_naming_what_to_give(tmp_path: Path) -> None:
    order = process.Order(RunConfig(), tmp_path)
    with pytest.raises(ArtifactError, match="--in plan=PATH"):
        order.load(Plan)


def test_the_command_line_of_a_stage(tmp_path: Path) -> None:
    line = process.stage_command(
        "solve", tmp_path / "c", tmp_path, inputs={"graph": Path("g")}, outputs={"plan": Path("p")}, key="k"
    )
    assert line[1:3] == ["-m", "stages.solve"]
    assert line[-6:] == ["--in", "graph=g", "--out", "plan=p", "--key", "k"]


def test_threads_are_known_to_libraries_before_they_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    made = process.stage_environment(RunConfig(device=DeviceConfig(threads=3)))
    assert made["OMP_NUM_THREADS"] == made["MKL_NUM_THREADS"] == "3"
    assert made["PYTHONUNBUFFERED"] == ""  # what the person set stays


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_a_signal_ended_is_described(number: signal.Signals) -> None:
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    ended = process.run_child([sys.executable, "-c", code], os.environ)
    assert ended == -number
    assert number.name in process.describe_end("profile", ended)
    assert process.exit_code(ended) == 128 + number


def test_death_by_the_kernel_speaks_of_memory() -> None:
    assert "memory" in process.describe_end("runtime", -signal.SIGKILL)


PARENT = """
import os, sys
from stages.process import run_child
from stages.stopping import PARENT
child = "import time; print('ready', flush=True); time.sleep(60)"
if sys.argv[1] == "own":
    child = "from stages.stopping import die_with_parent; die_with_parent();" + child
code = run_child([sys.executable, "-c", child], {**os.environ, PARENT: str(os.getpid())})
print("ended", code, flush=True)
"""


def start_parent(kind: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-c", PARENT, kind]
    parent = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    return parent


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_child(number: signal.Signals) -> None:
    parent = start_parent("plain")
    parent.send_signal(number)
    out, _ = parent.communicate(timeout=30)
    assert out == f"ended {-number}\n"


def test_a_child_dies_with_a_killed_parent() -> None:
    parent = start_parent("own")
    parent.kill()
    # the child holds the pipe's other end until it is gone
    out, _ = parent.communicate(timeout=30)
    assert out == ""


def test_an_interrupted_stage_cleans_up(tmp_path: Path) -> None:
    body = textwrap.dedent("""
        try:
            print('ready', flush=True); import time; time.sleep(60)
        finally:
            (order.run_folder / 'cleaned').touch()
    """)
    save_composed(RunConfig(budget="1GB"), tmp_path / "config.json")
    script = tmp_path / "stage.py"
    script.write_text(STAGE.format(body=textwrap.indent(body, "    ")))
    line = [
        sys.executable,
        str(script),
        "--composed",
        str(tmp_path / "config.json"),
        "--run-dir",
        str(tmp_path),
    ]
    child = subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.05)
    child.terminate()
    assert child.wait(timeout=30) == 128 + signal.SIGTERM
    assert (tmp_path / "cleaned").exists()
