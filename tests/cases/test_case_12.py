"""Case 12: a mistyped key silently added, and a value with "=" that the grammar cannot read."""

from __future__ import annotations

import pytest

from stages import cli
from stages.artifacts.errors import ConfigError


@pytest.mark.parametrize("argument", ["budgte=8GB", "+budgte=8GB", "++budgte=8GB"])
def test_a_mistyped_budget_is_refused_with_the_key_that_was_meant(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean budget\?"):
        cli.check_arguments(["model=mlp", argument])


@pytest.mark.parametrize("key", ["export.final", "resume", "checkpoint.dir"])
def test_a_path_with_an_equals_sign_works(key: str) -> None:
    checked = cli.compose(["model=mlp", "budget=1GB", f"{key}=ck/step=3"])
    section, _, name = key.rpartition(".")
    assert getattr(getattr(checked, section) if section else checked, name) == "ck/step=3"


def test_what_the_grammar_cannot_read_is_answered_with_its_quoting() -> None:
    with pytest.raises(ConfigError) as caught:
        cli.check_arguments(["model=mlp", "+model.arguments.path=ck/step=3"])
    assert """'+model.arguments.path="ck/step=3"'""" in str(caught.value)
