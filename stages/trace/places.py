"""Where in the user's model something happened: module, file and line."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(str(torch.__file__)).parent)


def is_users(filename: str) -> bool:
    """Whether a source file belongs neither to PyTorch nor to this package's machinery."""
    if filename.startswith(("<", _TORCH)):
        return False
    return not filename.startswith(_OWN) or f"{_OWN}/models" in filename


def user_place() -> str:
    """The "file:line" of the innermost frame of the user's on the current stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return "the model" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def error_place(error: BaseException, model: torch.nn.Module | None) -> tuple[str, str]:
    """(module path, "file:line") of the user's innermost frame in the traceback of `error`.

    Through chained errors to the first cause that has such a frame; ("", "") when none has.
    """
    seen: set[int] = set()
    place, name = "", ""
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        found = _innermost(current.__traceback__, model)
        if found[1]:
            name, place = found
        current = current.__cause__ or current.__context__
    return name, place


def _innermost(trace: TracebackType | None, model: torch.nn.Module | None) -> tuple[str, str]:
    names = {} if model is None else {id(module): name for name, module in model.named_modules()}
    place, module_name = "", ""
    for frame, line in traceback.walk_tb(trace):
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            module_name = names[id(owner)] or type(owner).__name__
        if is_users(frame.f_code.co_filename):
            place = f"{frame.f_code.co_filename}:{line}"
    return module_name, place


def source_line(place: str) -> str:
    """The text at "file:line", without its indentation; the place itself where there is none."""
    filename, _, number = place.rpartition(":")
    return linecache.getline(filename, int(number)).strip() if number.isdigit() else place


def stack_place(stack: str | None) -> str:
    """The "file.py:line" of the innermost frame of the user's in a recorded stack trace."""
    place = ""
    for line in (stack or "").splitlines():
        if not line.lstrip().startswith('File "'):
            continue
        filename, _, rest = line.lstrip()[6:].partition('", line ')
        if is_users(filename):
            place = f"{Path(filename).name}:{rest.split(',')[0]}"
    return place


def user_module(model: torch.nn.Module) -> str:
    """Path of the module whose forward is running, from the current stack; its class at the top."""
    names = {id(module): name for name, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if id(owner) in names:
            return names[id(owner)] or type(owner).__name__
        frame = frame.f_back
    return type(model).__name__
