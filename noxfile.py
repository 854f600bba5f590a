"""Checks: `nox` runs lint, typecheck and tests; bench, gpu and slow are run by name."""

from __future__ import annotations

import nox

nox.options.sessions = ["lint", "typecheck", "tests"]
nox.options.reuse_existing_virtualenvs = True
nox.needs_version = ">=2024.4.15"

SOURCES = ("stages", "tests", "benchmarks", "noxfile.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format."""
    session.install("ruff>=0.9")
    session.run("ruff", "check", *(session.posargs or SOURCES))
    session.run("ruff", "format", "--check", *(session.posargs or SOURCES))


@nox.session
def typecheck(session: nox.Session) -> None:
    """Pyright over the package."""
    session.install("-e", ".[test]", "pyright[nodejs]>=1.1.390", "nox")
    session.run("pyright", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs neither minutes nor special hardware, one process per core."""
    session.install("-e", ".[test]")
    session.run("pytest", "-n", "auto", "--dist", "worksteal", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmarks, with pytest-benchmark's table."""
    session.install("-e", ".[test]")
    session.run("pytest", "benchmarks", "--benchmark-only", "-m", "", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Tests on a CUDA device."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "gpu", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """Tests that take minutes, and those inside a memory cgroup."""
    session.install("-e", ".[test]")
    session.run("pytest", "-m", "slow or cgroup", *session.posargs)
