"""Case 13: a model whose import raises. The original type, file and line, and no variable to set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from stages import process


def test_the_original_type_file_and_line_are_shown(tmp_path: Path) -> None:
    (tmp_path / "broken_model.py").write_text(
        "import torch\n\nratio = 1 / 0\n\nclass Net(torch.nn.Module): ...\n"
    )
    root = str(Path(process.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, str(tmp_path)])}
    environment.pop("HYDRA_FULL_ERROR", None)
    line = [sys.executable, "-m", "stages.run", "model=module", "model.target=broken_model.Net", "budget=4GB"]
    line += ["hydra.run.dir=out", f"store={tmp_path}/store"]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    for shown in ("ZeroDivisionError", "broken_model.py:3"):
        assert shown in done.stderr
    assert "hydra" not in done.stderr.lower()
    assert "ZeroDivisionError" in json.loads((tmp_path / "out" / "error.json").read_text())["message"]
