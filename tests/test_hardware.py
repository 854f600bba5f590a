"""Every hardware entry is whole, and plans for it never train."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stages.artifacts.errors import ConfigError
from stages.cli import compose
from stages.config import HardwareConfig, RunConfig
from stages.hardware import MEASURED, SIZE_FIELDS
from stages.preconditions import for_hardware
from stages.sizes import parse_size

OPTIONS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "conf/hardware").glob("*.yaml"))
ASKED_FOR = {
    "rtx4090", "rtx3060", "rtx3080", "rtx3090", "v100", "a100-40", "a100-80", "h100", "h200", "laptop",
}  # fmt: skip


def composed(name: str, *more: str) -> RunConfig:
    return compose(["model=mlp", f"hardware={name}", "budget=1GB", *more])


def test_the_entries_that_were_asked_for_are_there() -> None:
    assert set(OPTIONS) >= ASKED_FOR | {MEASURED}


@pytest.mark.parametrize("name", [option for option in OPTIONS if option != MEASURED])
def test_every_entry_composes_and_its_numbers_are_positive_and_consistent(name: str) -> None:
    found = composed(name).hardware
    assert found.name == name
    assert found.planned_for
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if field.name in SIZE_FIELDS:
            assert found.size(field.name) > 0
        elif not isinstance(value, (str, bool)):
            assert value > 0, field.name
    assert found.fp32_tflops <= found.tf32_tflops <= found.fp16_tflops
    assert found.both_gb_s <= min(found.upload_gb_s, found.download_gb_s) < found.memory_gb_s
    assert found.disk_read_both_gb_s <= found.disk_read_gb_s <= found.upload_gb_s
    assert found.disk_write_both_gb_s <= found.disk_write_gb_s <= found.download_gb_s
    assert found.size("context") + found.size("baseline") < found.size("memory")
    assert found.size("host_baseline") < found.size("host_memory") < found.size("disk")


def test_by_default_this_machine_is_measured() -> None:
    assert not compose(["model=mlp", "budget=1GB"]).hardware.planned_for
    assert compose(["model=mlp", "hardware=none", "budget=1GB"]).hardware == HardwareConfig()


def test_any_number_can_be_given() -> None:
    found = composed("rtx4090", "hardware.host_memory=128GB", "hardware.achievable=0.5").hardware
    assert (found.size("host_memory"), found.achievable) == (128 * 10**9, 0.5)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("hardware.achievable=1.5", "hardware.achievable"),
        ("hardware.upload_gb_s=0", "hardware.upload_gb_s"),
        ("hardware.host_memory=8Gb", "hardware.host_memory"),
        ("hardware.disk=none", "hardware.disk"),
        ("hardware.host_mem=8GB", "hardware.host_mem"),
    ],
)
def test_what_cannot_be_is_refused_by_name(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        composed("rtx4090", override)
    assert refusal.value.key == key


@pytest.mark.parametrize("only", ["", "runtime", "report"])
def test_nothing_is_trained_on_hardware_that_is_not_here(only: str) -> None:
    with pytest.raises(ConfigError, match=r"stages\.solve") as refusal:
        for_hardware(composed("h100"), only)
    assert refusal.value.key == "hardware"


def test_a_budget_beyond_the_device_is_refused_and_its_largest_is_named() -> None:
    config = composed("rtx3080")
    config.budget = "11GB"
    with pytest.raises(ConfigError) as refusal:
        for_hardware(config, "solve")
    assert refusal.value.key == "budget"
    config.budget = refusal.value.expected.removeprefix("at most ").removesuffix(" bytes")
    assert parse_size(config.budget, "budget") == 10240 * 2**20 - 500 * 10**6
    assert for_hardware(config, "solve").hardware == config.hardware
