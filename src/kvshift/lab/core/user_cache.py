"""Where downloads are kept for the user, whichever project they work in."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """A folder `name` in $HF_HOME/kvshift, else $XDG_CACHE_HOME/kvshift, else ~/.cache/kvshift; it need not exist."""
    home = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "kvshift" / name
