"""Sizes as text, in and out: `8GB` is 8 * 10^9 bytes."""

from __future__ import annotations

import math
import re

from stages.artifacts.errors import ConfigError

_UNITS = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+)(?:\.([0-9]+))?\s*([A-Za-z]*)\s*")
_SIZE_EXPECTED = "a positive size such as 8GB (10^9 bytes), 8GiB (2^30 bytes), 1200MB or a count of bytes"


def parse_size(text: str | int, key: str) -> int:
    """The bytes that `text` stands for: 8GB, 8GiB, 8gb, 1.5GB, 8192MB, 1000000.

    GB is 10^9 bytes and GiB 2^30; a bare integer is bytes. Letters may have any case, except that
    a lower-case b after a capital, as in 8Gb, means bits and is refused.

    Args:
        key: The configuration key, for the message.

    Raises:
        ConfigError: `text` is no size, or not positive.
    """
    found = str(text)

    def refuse(why: str) -> ConfigError:
        message = f"{key}={found} {why}; expected {_SIZE_EXPECTED}"
        return ConfigError(message, key=key, found=found, expected=_SIZE_EXPECTED)

    match = _SIZE.fullmatch(found)
    if match is None:
        raise refuse("is not a size")
    whole, fraction, unit = match.group(1), match.group(2) or "", match.group(3)
    if unit.endswith("b") and unit != unit.lower():
        raise refuse("counts bits (a small b after a capital letter)")
    if unit.lower() not in _UNITS and unit:
        raise refuse(f"has the unknown unit {unit}")
    if fraction and not unit:
        raise refuse("is not a whole number of bytes")
    size, remainder = divmod(int(whole + fraction) * _UNITS[unit.lower() or "b"], 10 ** len(fraction))
    if remainder:
        raise refuse("is not a whole number of bytes")
    if size == 0:
        raise refuse("is zero")
    return size


def format_size(size_bytes: int) -> str:
    """Bytes as text in the one unit of all reports, MB (10^6 bytes), rounded up to a tenth.

    `parse_size` reads it back: a budget that is printed can be given.
    """
    return f"{math.ceil(size_bytes / 10**5) / 10:.1f}MB"
