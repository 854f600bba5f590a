"""The keys under which stages keep their artifacts: what of the configuration, code and machine counts."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stages
from stages.artifacts.envelope import SCHEMA_VERSION, content_hash
from stages.artifacts.store import describe_files, hash_files, key_of, machine
from stages.config import RunConfig
from stages.process import EVALUATION, versions
from stages.sources import installed_version, local_sources

#: the folder that holds the package
_ROOT = Path(stages.__file__).resolve().parent.parent


def trace_key(config: RunConfig) -> str:
    """Model, its sources and weights' names, sizes and times, planned sizes, precision, device."""
    model: dict[str, Any] = dataclasses.asdict(config.model)
    if config.model.path:
        folder = Path(config.model.path).absolute()
        model["path"] = str(folder)
        model["files"] = describe_files(folder)
        model["json"] = hash_files(folder.glob("*.json"))
    if config.model.target:
        module = config.model.target.rpartition(".")[0]
        model["version"] = installed_version(module)
        model["sources"] = hash_files(local_sources(module, [os.getcwd(), *sys.path]))
    return key_of(
        {
            "model": model,
            "lora": dataclasses.asdict(config.lora),
            "sizes": [config.data.shape_of(name) for name in config.model.inputs],
            "precision": config.precision,
            "device": config.device.name,
            "trace": dataclasses.asdict(config.trace),
            # a constructor may branch on drawn numbers; the record then holds for one seed
            "seed": config.seed,
            "code": _code("stages.trace.stage"),
            **_common(),
        }
    )


def profile_key(config: RunConfig, graph: Path, allocator: str) -> str:
    """The graph, and what measuring depends on: machine, threads, device, optimizer, disk, allocator."""
    disk = str(Path(config.tiers.disk).absolute()) if config.tiers.disk else ""
    return key_of(
        {
            "graph": content_hash(graph),
            "machine": machine(),
            "device": dataclasses.asdict(config.device),
            "precision": config.precision,
            "optimizer": dataclasses.asdict(config.optimizer),
            "disk": disk,
            "allocator": allocator,
            "slices": _slices(config),
            # slices that would burst it are not measured
            "budget": 0 if config.wants_curve or not _cuts_freely(config) else config.budget_bytes,
            "code": _code("stages.trace.profile.stage"),
            **_common(),
        }
    )


def roofline_key(config: RunConfig, graph: Path) -> str:
    """The graph, the hardware planned for, and the optimizer; no machine."""
    return key_of(
        {
            "graph": content_hash(graph),
            "hardware": dataclasses.asdict(config.hardware),
            "slices": _slices(config),
            "precision": config.precision,
            "optimizer": dataclasses.asdict(config.optimizer),
            "code": _code("stages.trace.profile.roofline.stage"),
            **_common(),
        }
    )


def solve_key(config: RunConfig, artifacts: Mapping[str, Path]) -> str:
    """Graphs and costs, budgets and solver."""
    tiers = config.tiers
    solver = dataclasses.asdict(config.solver)
    del solver["replan"]  # what is done with a plan, not what the plan is
    return key_of(
        {
            "inputs": {
                kind: content_hash(path)
                for kind, path in artifacts.items()
                if kind.removeprefix(EVALUATION) in ("graph", "costs")
            },
            "budgets": [config.budget_bytes, tiers.host_budget, tiers.disk_budget],
            "hardware": dataclasses.asdict(config.hardware),
            "solver": solver,
            "slices": _slices(config),
            "update": _update(config),
            "precision": config.precision,
            "code": _code("stages.solve.stage"),
            **_common(),
        }
    )


def _cuts_freely(config: RunConfig) -> bool:
    return config.solver.micro_batches == "auto"


def _slices(config: RunConfig) -> dict[str, Any]:
    """What says into how many micro-batches the batch is cut."""
    train = config.train
    return {
        "micro_batches": train.micro_batches,
        "loss": train.loss,
        "solver": config.solver.micro_batches,
    }


def _update(config: RunConfig) -> dict[str, Any]:
    """What a plan's updates wait for."""
    train = config.train
    return {
        "deferred": train.defers_update(config.precision),
        "clips": train.clips,
        "accumulate": train.accumulate,
    }


@functools.cache
def _code(module: str) -> str:
    """A hash of the stage's source and of all of ours that it imports."""
    return hash_files(code_files(module))


def code_files(module: str) -> list[Path]:
    # the package's public face offers every stage to its callers; no stage depends on it
    return local_sources(module, [str(_ROOT)], within=_ROOT / "stages", leaves=("stages",))


def _common() -> dict[str, Any]:
    return {"versions": versions(), "schema": SCHEMA_VERSION}
