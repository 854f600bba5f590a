"""Imported by every Python process that has this folder on its path: see `tests/faults/injection.py`."""

import importlib.util
import os
import sys
from pathlib import Path

_name = "faults_of_this_process"
_spec = importlib.util.spec_from_file_location(_name, Path(__file__).parents[1] / "injection.py")
assert _spec is not None
assert _spec.loader is not None
_module = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
_module.inject_here(os.environ)
