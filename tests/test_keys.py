"""A stale artifact is not used: the module edited, weights replaced, threads or sizes changed."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest

from stages import keys
from stages.config import DataConfig, DeviceConfig, ModelConfig, OptimizerConfig, RunConfig, SolverConfig
from stages.sources import installed_version, local_sources


def config(**changes: object) -> RunConfig:
    base = RunConfig(
        model=ModelConfig(name="m", source="module", target="mine.model.Net"),
        data=DataConfig(name="text"),
        optimizer=OptimizerConfig(name="adamw"),
        solver=SolverConfig(name="resident"),
        device=DeviceConfig(name="cpu"),
        budget="1GB",
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text("import os, helper\nfrom .layers import Layer\nclass Net: pass\n")
    (package / "layers.py").write_text("class Layer: pass\n")
    (package / "unused.py").write_text("")
    (tmp_path / "helper.py").write_text("raise RuntimeError('must not be imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def test_sources_are_the_module_its_packages_and_what_they_import_here(project: Path) -> None:
    names = [str(file.relative_to(project)) for file in local_sources("mine.model", sys.path)]
    assert names == ["helper.py", "mine/__init__.py", "mine/layers.py", "mine/model.py"]
    assert not {"mine", "helper"} & set(sys.modules)


def test_an_installed_package_is_known_by_its_version_not_its_files() -> None:
    assert local_sources("msgspec.json", sys.path) == []
    assert installed_version("msgspec.json").startswith("msgspec ")
    assert installed_version("no_such_module_here") == ""


def test_a_model_of_a_large_library_has_a_key_without_reading_the_library(project: Path) -> None:
    reads: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda self: reads.append(self) or b"")
        local_sources("transformers.models.gpt2", sys.path)
    assert reads == []


def test_a_module_that_is_not_there_has_no_sources() -> None:
    assert local_sources("no_such_module_here.at_all", sys.path) == []


@pytest.mark.parametrize("edited", ["mine/model.py", "mine/layers.py", "helper.py"])
def test_editing_the_module_or_what_it_imports_changes_the_trace(project: Path, edited: str) -> None:
    before = keys.trace_key(config())
    file = project / edited
    file.write_text(file.read_text() + "\n# edited\n")
    importlib.invalidate_caches()
    assert keys.trace_key(config()) != before


def test_editing_another_file_does_not(project: Path) -> None:
    before = keys.trace_key(config())
    (project / "mine" / "unused.py").write_text("# edited\n")
    assert keys.trace_key(config()) == before


@pytest.mark.parametrize(
    ("change", "matters"),
    [
        ({"precision": "bf16"}, True),
        ({"data": DataConfig(name="text", seq_len=8)}, True),
        (
            {"model": ModelConfig(name="m", source="module", target="mine.model.Net", arguments={"a": 1})},
            True,
        ),
        ({"steps": 99}, False),
        ({"seed": 5}, True),
        ({"budget": "2GB"}, False),
        ({"optimizer": OptimizerConfig(name="sgd")}, False),
        ({"store": "elsewhere"}, False),
    ],
)
def test_only_what_the_trace_depends_on_changes_its_key(project: Path, change: dict, matters: bool) -> None:
    assert (keys.trace_key(config(**change)) != keys.trace_key(config())) == matters


def test_replaced_weights_change_the_trace(project: Path) -> None:
    folder = project / "saved"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1")
    saved = config(model=ModelConfig(name="hf", source="directory", path="saved"))
    before = keys.trace_key(saved)
    (folder / "model.safetensors").write_bytes(b"12")
    changed = keys.trace_key(saved)
    (folder / "config.json").write_text('{"n_layer": 2}')
    assert len({before, changed, keys.trace_key(saved)}) == 3


def test_costs_depend_on_threads_and_the_graph_not_on_the_budget(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = project / "graph.json"
    graph.write_text("a")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = keys.profile_key(config(), graph, "system")
    assert keys.profile_key(config(budget="2GB"), graph, "system") == before
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    cut, cut_tighter = (
        keys.profile_key(
            config(budget=budget, solver=SolverConfig("auto", micro_batches="auto")), graph, "system"
        )
        for budget in ("8GB", "2GB")
    )
    assert cut != cut_tighter  # what bursts it is not measured
    threads = keys.profile_key(config(), graph, "system")
    named = keys.profile_key(config(device=DeviceConfig(name="cpu", threads=3)), graph, "system")
    graph.write_text("b")
    pool = keys.profile_key(config(), graph, "page pool")
    assert len({before, threads, named, pool, keys.profile_key(config(), graph, "system")}) == 5


def test_a_plan_depends_on_budget_solver_graph_and_costs(project: Path) -> None:
    graph, costs = project / "graph.json", project / "costs.json"
    graph.write_text("a")
    costs.write_text("a")
    found = {keys.solve_key(config(), {"graph": graph, "costs": costs})}
    found.add(keys.solve_key(config(budget="2GB"), {"graph": graph, "costs": costs}))
    found.add(keys.solve_key(config(solver=SolverConfig(name="layerwise")), {"graph": graph, "costs": costs}))
    costs.write_text("b")
    found.add(keys.solve_key(config(), {"graph": graph, "costs": costs}))
    graph.write_text("b")
    found.add(keys.solve_key(config(), {"graph": graph, "costs": costs}))
    assert len(found) == 5
    assert keys.solve_key(config(budget="1000MB"), {"graph": graph, "costs": costs}) == keys.solve_key(
        config(), {"graph": graph, "costs": costs}
    )


def test_versions_of_libraries_change_every_key(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys.trace_key(config())
    monkeypatch.setattr(keys, "versions", lambda: {"torch": "another"})
    assert keys.trace_key(config()) != before


@pytest.mark.parametrize("stage", ["stages.trace.stage", "stages.trace.profile.stage", "stages.solve.stage"])
def test_the_code_of_a_stage_is_its_own_folder_and_what_it_imports(stage: str) -> None:
    root = Path(keys.__file__).parents[1]
    found = {str(file.relative_to(root)) for file in keys.code_files(stage)}
    assert stage.replace(".", "/") + ".py" in found
    assert {"stages/artifacts/graph.py", "stages/config.py"} <= found
    assert not {"stages/cli.py", "stages/run.py", "stages/runtime/loop.py"} & found


def test_the_planner_is_not_run_again_when_tracing_code_changes() -> None:
    folders = {file.parent.name for file in keys.code_files("stages.solve.stage")}
    assert "trace" not in folders
