"""The dynamic loss scale's rules, step by step."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.artifacts.errors import ConfigError
from stages.optim.scaler import LossScaler
from stages.training import LossScaleConfig


def after(*overflows: bool, settings: LossScaleConfig | None = None) -> LossScaler:
    scaler = LossScaler(settings)
    for overflow in overflows:
        scaler.update(found_non_finite=overflow)
    return scaler


def test_the_defaults_are_those_of_the_predecessor() -> None:
    assert LossScaleConfig() == LossScaleConfig(2.0**16, 2.0, 1000, 0.5, 2, 1.0, 2.0**32)
    assert LossScaler().scale == 65536.0


def test_the_first_overflow_is_forgiven_and_each_further_one_halves() -> None:
    assert after(True).scale == 2.0**16
    assert after(True, True).scale == 2.0**15
    assert after(True, False, True, True).scale == 2.0**14


def test_a_thousand_clean_steps_double_it_and_forgive_past_overflows() -> None:
    assert after(*[False] * 999).scale == 2.0**16
    assert after(*[False] * 1000).scale == 2.0**17
    scaler = after(True, *[False] * 1000)
    assert scaler.scale == 2.0**17
    scaler.update(found_non_finite=True)
    assert scaler.scale == 2.0**17


def test_an_overflow_starts_the_count_of_clean_steps_again() -> None:
    assert after(*[False] * 999, True, *[False] * 999).scale == 2.0**16
    assert after(*[False] * 999, True, *[False] * 1000).scale == 2.0**17


@given(st.lists(st.booleans(), max_size=300))
def test_the_scale_stays_a_power_of_two_within_its_bounds(overflows: list[bool]) -> None:
    settings = LossScaleConfig(initial=8.0, growth_interval=2, hysteresis=1, minimum=1.0, maximum=64.0)
    scaler = after(*overflows, settings=settings)
    assert scaler.scale in {2.0**power for power in range(7)}


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_a_restored_scaler_goes_on_as_the_saved_one(before: list[bool], later: list[bool]) -> None:
    settings = LossScaleConfig(growth_interval=3)
    saved = after(*before, settings=settings)
    resumed = LossScaler(settings)
    resumed.restore(saved.state())
    for overflow in later:
        saved.update(found_non_finite=overflow)
        resumed.update(found_non_finite=overflow)
    assert resumed.state() == saved.state()


@pytest.mark.parametrize(
    "state",
    [{}, {"scale": 8.0}, {"scale": 2.0**40, "clean_steps": 0, "overflows": 0}],
    ids=["none", "part", "range"],
)
def test_a_damaged_state_is_refused(state: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        LossScaler().restore(state)


@pytest.mark.parametrize(
    "settings",
    [
        {"initial": 0.5},
        {"minimum": 0.0},
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"hysteresis": 0},
        {"growth_interval": 0},
        {"initial": 1000.0},  # no power of two: scaling would round
        {"maximum": float("inf")},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        LossScaleConfig(**settings)  # type: ignore[arg-type]


def test_it_needs_no_torch() -> None:
    script = (
        "import importlib.util, sys\n"
        "spec = importlib.util.find_spec('stages.optim')\n"
        "path = spec.submodule_search_locations[0] + '/scaler.py'\n"
        "module = importlib.util.module_from_spec(importlib.util.spec_from_file_location('scaler', path))\n"
        "sys.modules['scaler'] = module\n"
        "module.__spec__.loader.exec_module(module)\n"
        "module.LossScaler().update(found_non_finite=True)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
