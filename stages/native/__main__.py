"""`LD_PRELOAD=$(python -m stages.native) python train.py` gives the page pool to a script of one's own."""

from __future__ import annotations

import sys

from stages.artifacts.errors import ConfigError
from stages.native.build import page_pool


def main() -> None:
    try:
        print(page_pool("pool").library)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
