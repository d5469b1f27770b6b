"""The folder for downloads, shared by all projects of a user."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Return the folder `name` in $HF_HOME/kvshift, $XDG_CACHE_HOME/kvshift or ~/.cache/kvshift; it may not exist."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "kvshift" / name
