"""Case 14: units. The documented number of bytes, or a refusal that names the key."""

from __future__ import annotations

import re

import pytest

from stages import cli
from stages.artifacts.errors import ConfigError
from stages.config import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("8gb", 8 * 10**9),
        ("8gib", 8 * 2**30),
        ("8192MB", 8192 * 10**6),
        ("8000000000", 8 * 10**9),
    ],
)
def test_documented_bytes(text: str, size: int) -> None:
    config = cli.compose(["model=mlp", f"budget={text}"])
    assert parse_size(config.budget, "budget") == config.budget_bytes == size


@pytest.mark.parametrize("text", ["0", "-1", "8XB", "8Gb", "nonsense"])
def test_anything_else_is_refused_naming_the_key(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cli.compose(["model=mlp", f"budget={text}"])
    assert (caught.value.key, caught.value.found) == ("budget", text)
    assert f"budget={text}" in str(caught.value)


@pytest.mark.parametrize("size", [1, 999_999, 10**6, 123_456_789, 8 * 10**9, 2**40])
def test_reports_use_one_unit(size: int) -> None:
    assert re.fullmatch(r"\d+\.\dMB", format_size(size))
