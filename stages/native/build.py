"""The page pool (`pool.c`) as a library: compiled once per machine and source, tried before it is used."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stages.artifacts.errors import ConfigError
from stages.artifacts.store import default_folder

SOURCE = Path(__file__).parent / "pool.c"
_FLAGS = ("-O2", "-shared", "-fPIC")
_TIMEOUT_S = 60.0
#: loads the library the way a stage process will, allocates and frees
_TRIAL = (
    "import ctypes\n"
    "library = ctypes.CDLL(None)\n"
    "address = ctypes.c_void_p()\n"
    "assert library.posix_memalign(ctypes.byref(address), 64, 1 << 20) == 0\n"
    "live = library.stages_pool_live_bytes()\n"
    "ctypes.memset(address, 1, 1 << 20)\n"
    "library.free(address)\n"
    "assert live == 1 << 20 and library.stages_pool_live_bytes() == 0\n"
)


@dataclass(frozen=True)
class PagePool:
    """The library, or why there is none.

    Attributes:
        library: None: freed pages go back to the system.
        reason: Empty where there is a library.
    """

    library: Path | None
    reason: str = ""

    @property
    def name(self) -> str:
        """What serves large blocks, as keys and reports call it."""
        return "page pool" if self.library else "system"


def page_pool(wanted: str, folder: Path | None = None) -> PagePool:
    """The page pool for new processes.

    Args:
        wanted: "auto": where it can be had; "pool": required; "system": none.
        folder: Where compiled libraries are kept; None: in the user's cache folder.

    Raises:
        ConfigError: It is required and cannot be had.
    """
    if wanted == "system":
        return PagePool(None, "runtime.allocator=system")
    found = _page_pool(folder or default_folder() / "native")
    if wanted == "pool" and found.library is None:
        raise ConfigError(
            f"runtime.allocator=pool cannot be used: {found.reason}. Install a C compiler, or use "
            f"runtime.allocator=auto",
            key="runtime.allocator",
            found=found.reason,
            expected="a C compiler that works (CC, or cc)",
        )
    return found


@functools.cache
def _page_pool(folder: Path) -> PagePool:
    if sys.platform != "linux":
        return PagePool(None, f"it needs Linux, and this is {sys.platform}")
    if os.environ.get("LD_PRELOAD"):
        return PagePool(None, f"LD_PRELOAD={os.environ['LD_PRELOAD']} is set already")
    source = SOURCE.read_bytes()
    digest = hashlib.sha256(source + platform.machine().encode() + " ".join(_FLAGS).encode()).hexdigest()
    library = folder / f"pool-{digest[:16]}.so"
    try:
        if not (library.exists() and _works(library)):
            _compile(library)
            _try_out(library)
    except OSError as error:
        return PagePool(None, f"{error.filename or 'the compiler'}: {error.strerror or error}")
    except subprocess.SubprocessError as error:
        return PagePool(None, str(error))
    return PagePool(library)


def _compile(library: Path) -> None:
    """Compiles under another name and renames, so that a half-written library is never there.

    Raises:
        OSError: No compiler, or the folder cannot be written.
        subprocess.SubprocessError: The compiler failed.
    """
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise FileNotFoundError(2, "no such C compiler", command[0])
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        _run([*command, *_FLAGS, "-o", str(made), str(SOURCE), "-ldl", "-lpthread"], {})
        if not made.exists():
            raise subprocess.SubprocessError(f"{shlex.join(command)} compiled nothing")
        os.replace(made, library)


def _works(library: Path) -> bool:
    """Whether a library of an earlier run is whole."""
    try:
        _try_out(library)
    except subprocess.SubprocessError:
        return False
    return True


def _try_out(library: Path) -> None:
    _run([sys.executable, "-S", "-c", _TRIAL], {"LD_PRELOAD": str(library)})


def _run(command: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise subprocess.SubprocessError(f"{command[0]} failed ({done.returncode}): {last}")
