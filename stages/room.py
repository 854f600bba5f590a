"""How much memory this process may still take before the system or its cgroup ends it."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
#: cgroup v1 says "no limit" with a number near 2^63
_UNLIMITED = 1 << 60


def available_bytes() -> int:
    """The smallest of the system's available memory and what each enclosing memory cgroup has left."""
    return min([_system_available(), *_left_in_cgroups()])


def most_bytes(held_bytes: int) -> int:
    """What this process may hold at most: every enclosing memory cgroup's limit, and what it has and
    the system could still give.

    Args:
        held_bytes: Of this process, now.
    """
    return min([_system_available() + held_bytes, *(limit for limit, _ in _cgroups())])


def _system_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; this needs Linux 3.14 or newer")


def _left_in_cgroups() -> list[int]:
    return [max(0, limit - used) for limit, used in _cgroups()]


def _cgroups() -> list[tuple[int, int]]:
    """Limit and use, in bytes, of every memory cgroup around this process that has a limit."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _along(_CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            found += _along(_CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return found


def _along(root: Path, path: str, limit_name: str, usage_name: str) -> list[tuple[int, int]]:
    """The group at `path` and each of its ancestors."""
    found = []
    folder = root / path.lstrip("/")
    while True:
        limit, usage = folder / limit_name, folder / usage_name
        if limit.exists() and usage.exists():
            text = limit.read_text().strip()
            if text != "max" and int(text) < _UNLIMITED:
                found.append((int(text), int(usage.read_text())))
        if folder == root or root not in folder.parents:
            return found
        folder = folder.parent
