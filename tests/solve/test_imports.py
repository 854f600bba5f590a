from __future__ import annotations

import subprocess
import sys


def test_planning_never_imports_torch() -> None:
    script = (
        "import sys\n"
        "from tests.solve.planning import plan_of\n"
        "from tests.solve.synthetic import chain\n"
        "plan_of(chain(3), 10**9)\n"
        "print([name for name in ('torch', 'transformers', 'hydra') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
