"""The source files behind a module, found without importing anything.

A person's model is traced anew when its file, or a file that it imports from the same project,
has changed. Importing it here would cost the composer the memory of torch.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

#: the standard library and site-packages
_INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]


def local_sources(
    module: str, search: list[str], within: Path | None = None, leaves: tuple[str, ...] = ()
) -> list[Path]:
    """The files of `module`, its packages, and what they import, as far as they are not installed.

    Files of the standard library and under site-packages are left out: they change with a version
    (`installed_version`). A module that is not found gives no file; tracing will say so.

    Args:
        search: Folders as in `sys.path`.
        within: Take exactly the files under this folder, installed or not.
        leaves: Modules whose own imports are not followed.
    """
    found: dict[str, list[Path]] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = []
        for part, file in _files(name, search):
            if file.is_relative_to(within) if within else not _is_installed(file):
                found[name].append(file)
                if part in leaves:
                    continue
                waiting += [other for other in _imports(file, part) if other not in found]
    return sorted({file for files in found.values() for file in files})


def _files(module: str, search: list[str]) -> Iterator[tuple[str, Path]]:
    """The source file of each package on the way to `module`, and its own, with their dotted names."""
    folders: list[str] | None = search
    parts = module.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        spec = importlib.machinery.PathFinder.find_spec(name, folders)
        if spec is None:
            return
        if spec.origin and spec.origin.endswith(".py"):
            yield name, Path(spec.origin)
        folders = list(spec.submodule_search_locations or [])


def _is_installed(file: Path) -> bool:
    in_packages = any(part in ("site-packages", "dist-packages") for part in file.parts)
    return in_packages or any(file.is_relative_to(folder) for folder in _INSTALLED)


def installed_version(module: str) -> str:
    """Names and versions of the distributions that `module`'s top-level package was installed from."""
    names = metadata.packages_distributions().get(module.partition(".")[0], [])
    return ", ".join(sorted(f"{name} {metadata.version(name)}" for name in set(names)))


def _imports(file: Path, module: str) -> Iterator[str]:
    """Dotted names that the file imports anywhere; of `from a import b` both a and a.b."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return  # tracing imports it and shows the error with its line
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
