"""Artifacts changed by hand, with a digest that fits: a crafted file has one too."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def sealed(envelope: dict[str, Any]) -> bytes:
    """An artifact's file from its decoded JSON."""
    digest = hashlib.sha256(json.dumps(envelope["content"]).encode()).hexdigest()
    return json.dumps({**envelope, "digest": digest}).encode()
