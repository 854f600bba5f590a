"""The schema's own rules: sizes as text, ranges, and the JSON that stages read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts.errors import ConfigError
from stages.config import (
    DataConfig,
    DeviceConfig,
    EvalConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    RuntimeConfig,
    SolverConfig,
    TiersConfig,
    TraceConfig,
    format_size,
    load_composed,
    parse_size,
    save_composed,
)


@given(st.integers(min_value=1, max_value=10**15))
def test_bare_integers_are_bytes(size: int) -> None:
    assert parse_size(str(size), "budget") == parse_size(size, "budget") == size


@given(st.integers(min_value=1, max_value=10**15))
def test_a_printed_size_reads_back_as_no_less_and_at_most_a_tenth_of_a_megabyte_more(size: int) -> None:
    assert 0 <= parse_size(format_size(size), "budget") - size < 10**5


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.5GB", 1_500_000_000),
        ("0.5KiB", 512),
        (" 8 GB ", 8 * 10**9),
        ("3kb", 3000),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "budget") == size


@pytest.mark.parametrize(
    "text", ["", "GB", "8 G B", "1e9", "8G", "0.0001KB", "1.5", "8Gib", "٣GB", "-1GB", "0GB"]
)
def test_what_is_no_size_is_refused_naming_key_and_text(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "tiers.host_budget")
    assert caught.value.key == "tiers.host_budget"
    assert caught.value.found == text
    assert "tiers.host_budget=" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: RunConfig(precision="fp8"), "precision"),
        (lambda: RunConfig(steps=0), "steps"),
        (lambda: RunConfig(seed=-1), "seed"),
        (lambda: RunConfig(budget="8XB"), "budget"),
        (lambda: ModelConfig(source="web"), "model.source"),
        (lambda: ModelConfig(source="directory"), "model.path"),
        (lambda: ModelConfig(source="module", target="Model"), "model.target"),
        (lambda: DataConfig(batch_size=0), "data.batch_size"),
        (lambda: DataConfig(seq_len=0), "data.seq_len"),
        (lambda: DataConfig(name="tokens"), "data.path"),
        (lambda: OptimizerConfig(lr=-1.0), "optimizer.lr"),
        (lambda: OptimizerConfig(lr=float("nan")), "optimizer.lr"),
        (lambda: OptimizerConfig(betas=[0.9]), "optimizer.betas"),
        (lambda: OptimizerConfig(betas=[0.9, 1.0]), "optimizer.betas"),
        (lambda: SolverConfig(name="magic"), "solver.name"),
        (lambda: DeviceConfig(name="tpu"), "device.name"),
        (lambda: DeviceConfig(threads=-1), "device.threads"),
        (lambda: TiersConfig(host_budget="8Gb"), "tiers.host_budget"),
        (lambda: TraceConfig(granularity="coarse"), "trace.granularity"),
        (lambda: EvalConfig(every=-1), "eval.every"),
        (lambda: RuntimeConfig(lane="fast"), "runtime.lane"),
    ],
)
def test_values_out_of_range_are_refused_naming_the_key(make, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.key == key
    assert caught.value.expected


def test_the_composed_file_round_trips(tmp_path: Path) -> None:
    config = RunConfig(
        model=ModelConfig(
            name="m", source="module", target="a.B", arguments={"x": [1, {"y": None}], "z": 1.5}
        ),
        optimizer=OptimizerConfig(name="adamw", lr=0.1 + 0.2),
        budget="8GB",
    )
    save_composed(config, tmp_path / "config.json")
    assert load_composed(tmp_path / "config.json") == config


@pytest.mark.parametrize("content", [b"", b"[]", b'{"steps": "many"}', b'{"steps": 0}'])
def test_a_damaged_composed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        load_composed(file)


def test_reading_the_composed_file_imports_neither_hydra_nor_torch() -> None:
    code = "import sys, stages.config, stages.process; print([m for m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for heavy in ("'hydra'", "'omegaconf'", "'torch'", "'numpy'", "'yaml'"):
        assert heavy not in done.stdout
