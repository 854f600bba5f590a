"""The source files behind a module, found without importing anything.

A person's model is traced anew when its file, or a file that it imports from the same project,
has changed. Importing it here would cost the composer the memory of torch.
"""

from __future__ import annotations

import ast
import importlib.machinery
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def local_sources(module: str, search: list[str]) -> list[Path]:
    """The files of `module`, its packages, and what they import, without installed packages' others.

    Files of the standard library are left out, and so are those under site-packages, unless `module`
    itself is installed there: then its own top-level package is followed. A module that is not found
    gives no file; tracing will say so.

    Args:
        search: Folders as in `sys.path`.
    """
    top = module.partition(".")[0]
    found: dict[str, list[Path]] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = []
        for part, file in _files(name, search):
            if _is_followed(file, part.partition(".")[0] == top):
                found[name].append(file)
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


def _is_followed(file: Path, of_the_target: bool) -> bool:
    paths = sysconfig.get_paths()
    installed = any(file.is_relative_to(paths[name]) for name in ("purelib", "platlib"))
    if installed:
        return of_the_target
    return not any(file.is_relative_to(paths[name]) for name in ("stdlib", "platstdlib"))


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
