"""Case 12: a mistyped key silently added, and a value with "=" that the grammar cannot read."""

from __future__ import annotations

import pytest

from stages import cli
from stages.artifacts.errors import ConfigError


@pytest.mark.parametrize("argument", ["budgte=8GB", "+budgte=8GB", "++budgte=8GB"])
def test_a_mistyped_budget_is_refused_with_the_key_that_was_meant(argument: str) -> None:
    with pytest.raises(ConfigError, match=r"did you mean budget\?"):
        cli.check_arguments(["model=mlp", argument])


def test_a_path_with_an_equals_sign_works_or_its_quoting_is_printed() -> None:
    checked = cli.compose(["model=mlp", "budget=1GB", "export.final=ck/step=3"])
    assert checked.export.final == "ck/step=3"
    with pytest.raises(ConfigError) as caught:
        cli.check_arguments(["resume=ck/step=3"])
    assert """'resume="ck/step=3"'""" in str(caught.value)
