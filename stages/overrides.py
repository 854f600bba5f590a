"""Checks `KEY=VALUE` arguments against the schema before Hydra composes them.

Hydra accepts `+budgte=8GB` as a new key, refuses `+model=gpt2` where `model` is a default, and takes
`steps=3.7` for 3: none of that is what the person meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from stages.artifacts.errors import ConfigError
from stages.config import CURVE, RunConfig, parse_size
from stages.hardware import SIZE_FIELDS as HARDWARE_SIZES

GROUPS = ("model", "data", "optimizer", "scheduler", "solver", "device", "hardware", "experiment", "sweep")
#: groups that change the whole configuration and have no section of their own
GLOBAL_GROUPS = ("experiment", "sweep")
SIZE_KEYS = (
    "budget", "export.shard", "tiers.host_budget", "tiers.disk_budget",
    *(f"hardware.{name}" for name in HARDWARE_SIZES),
)  # fmt: skip


def schema_keys(record: type = RunConfig, prefix: str = "") -> dict[str, Any]:
    """Every leaf of the schema by its dotted key, with its type."""
    hints = typing.get_type_hints(record)
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            keys.update(schema_keys(typing.cast(type, kind), f"{prefix}{field.name}."))
        else:
            keys[prefix + field.name] = kind
    return keys


def _is_open(kind: Any) -> bool:
    """Whether any key may lie below (a dict)."""
    return typing.get_origin(kind) is dict


def known_key(key: str, keys: Mapping[str, Any]) -> bool:
    return key in keys or any(_is_open(kind) and key.startswith(f"{name}.") for name, kind in keys.items())


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """The one of `keys` most like `key`: in the same section, else whole, else by its last part."""
    candidates = list(keys)
    section, _, last = key.rpartition(".")
    siblings = [name for name in candidates if section and name.rpartition(".")[0] == section]
    if siblings:
        close = difflib.get_close_matches(
            key[len(section) :], [name[len(section) :] for name in siblings], n=1
        )
        return section + close[0] if close else None
    whole = difflib.get_close_matches(key, candidates, n=1)
    if whole:
        return whole[0]
    by_last = {name.rpartition(".")[2]: name for name in reversed(candidates)}
    close = difflib.get_close_matches(last, by_last, n=1)
    return by_last[close[0]] if close else None


def unknown_key_error(key: str, keys: Iterable[str], extra: str = "") -> ConfigError:
    """The refusal of `key`, with the nearest of `keys` or those that could have been meant."""
    candidates = list(keys)
    nearest = nearest_key(key, candidates)
    section = key.rpartition(".")[0]
    siblings = [name for name in candidates if section and name.startswith(f"{section}.")]
    top = sorted({name.partition(".")[0] for name in candidates})
    expected = nearest or ", ".join(siblings or top)
    hint = f"did you mean {nearest}?" if nearest else f"expected one of: {expected}"
    message = f"{key} is not a key of the configuration; {hint}{extra}"
    return ConfigError(message, key=key, found=key, expected=expected)


def check_composed(content: Mapping[str, Any]) -> None:
    """Refuses a composed configuration with a key that the schema lacks, however it got there.

    Raises:
        ConfigError: Names the first such key and the nearest one.
    """
    keys = schema_keys()
    sections = {key.rpartition(".")[0] for key in keys}

    def visit(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key in sections and isinstance(value, Mapping):
                visit(value, f"{key}.")
            elif not known_key(key, keys):
                raise unknown_key_error(key, [*keys, *GROUPS])

    visit(content, "")


class OverrideChecker:
    """Turns the arguments of one command line into what Hydra should get.

    Args:
        folders: The folders in which group options lie, ours and the person's.
    """

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = list(folders)
        self._keys = schema_keys()
        self._parser = OverridesParser.create()

    def options(self, group: str) -> list[str]:
        found = {path.stem for folder in self._folders for path in (folder / group).glob("*.yaml")}
        return sorted(found)

    def normalise(self, argument: str) -> str:
        """One checked argument.

        Raises:
            ConfigError: It is no KEY=VALUE, its key is unknown, or its value cannot be used.
        """
        prefix, key, value = _split(argument)
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            return argument
        if prefix == "~":
            message = f"{argument}: {key} cannot be deleted; set another value with {key}=VALUE"
            raise ConfigError(message, key=key, found=argument, expected=f"{key}=VALUE")
        override, argument = self._parse(prefix, key, value, argument)
        if key in GROUPS:
            self._check_options(key, override)
            return argument.lstrip("+")
        if not known_key(key, self._keys):
            raise unknown_key_error(key, [*self._keys, *GROUPS])
        if key not in self._keys:  # below an open dict, where + tells new keys from mistyped ones
            return argument
        for found in _values(override):
            self._check_value(key, found)
        return argument.lstrip("+")

    def _parse(self, prefix: str, key: str, value: str, argument: str) -> tuple[Override, str]:
        """Parses, putting a text value in quotes if Hydra's grammar needs them."""
        try:
            return self._parser.parse_override(argument), argument
        except HydraException as error:
            quoted = f'{prefix}{key}="' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
            if self._keys.get(key) is str:
                return self._parser.parse_override(quoted), quoted
            advice = f"the value needs quotes, which the shell must not eat: '{quoted}'"
            if not known_key(key, self._keys):
                raise unknown_key_error(key, [*self._keys, *GROUPS], f" ({advice})") from error
            message = f"{argument} cannot be read: {advice}"
            raise ConfigError(message, key=key, found=argument, expected=quoted) from error

    def _check_options(self, group: str, override: Override) -> None:
        options = self.options(group)
        for value in _values(override):
            if value is None and group in GLOBAL_GROUPS:
                continue
            if value not in options:
                nearest = difflib.get_close_matches(str(value), options, n=1)
                hint = f"did you mean {group}={nearest[0]}? " if nearest else ""
                known = ", ".join(options)
                message = f"{group}={value} is not known; {hint}expected one of: {known}"
                raise ConfigError(message, key=group, found=str(value), expected=known)

    def _check_value(self, key: str, value: Any) -> None:
        if key in SIZE_KEYS and value not in ("", None) and (key, value) != ("budget", CURVE):
            parse_size(value, key)
        if self._keys[key] is int and isinstance(value, float):
            message = f"{key}={value} is not a whole number; expected an integer"
            raise ConfigError(message, key=key, found=str(value), expected="an integer")


def _split(argument: str) -> tuple[str, str, str]:
    """The prefix ("", "+", "++", "~"), key and value of `argument`."""
    key, equals, value = argument.partition("=")
    bare = key.lstrip("+~")
    prefix = key[: len(key) - len(bare)]
    if not equals and prefix != "~":
        message = f"{argument} is no KEY=VALUE; write for example {bare or 'budget'}=VALUE"
        raise ConfigError(message, key=bare, found=argument, expected="KEY=VALUE")
    return prefix, bare, value


def _values(override: Override) -> list[Any]:
    """The value, or each value of a discrete sweep, without quotes."""
    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            return []
        return [_plain(value) for value in override.sweep_iterator()]
    return [_plain(override.value())]


def _plain(value: Any) -> Any:
    return getattr(value, "text", value)
