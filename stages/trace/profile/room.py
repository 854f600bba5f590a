"""How much memory this process may still take before the system or its cgroup ends it."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
#: cgroup v1 says "no limit" with a number near 2^63
_UNLIMITED = 1 << 60


def available_bytes() -> int:
    """The smallest of the system's available memory and what each enclosing memory cgroup has left."""
    return min([_system_available(), *_left_in_cgroups()])


def _system_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; this needs Linux 3.14 or newer")


def _left_in_cgroups() -> list[int]:
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            left += _left_along(_CGROUPS, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left_along(_CGROUPS / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return left


def _left_along(root: Path, path: str, limit_name: str, usage_name: str) -> list[int]:
    """What is left in the group at `path` and in each of its ancestors that has a limit."""
    left = []
    folder = root / path.lstrip("/")
    while True:
        limit, usage = folder / limit_name, folder / usage_name
        if limit.exists() and usage.exists():
            text = limit.read_text().strip()
            if text != "max" and int(text) < _UNLIMITED:
                left.append(max(0, int(text) - int(usage.read_text())))
        if folder == root or root not in folder.parents:
            return left
        folder = folder.parent
