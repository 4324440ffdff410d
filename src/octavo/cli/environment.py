"""What the process environment says. The only file of octavo that reads environment variables of its own.

It does not know what the values are used for.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CACHE_VARIABLE = "OCTAVO_CACHE"
API_KEY_VARIABLE = "OCTAVO_API_KEY"


def cache_dir() -> Path | None:
    """Where models are kept; None: the default place."""
    text = os.environ.get(CACHE_VARIABLE, "")
    return Path(text).expanduser() if text else None


def api_keys() -> tuple[str, ...]:
    """Keys separated by commas. Better than the flag, which other users can read in the process list."""
    return tuple(key for key in (part.strip() for part in os.environ.get(API_KEY_VARIABLE, "").split(",")) if key)


def compiler() -> str | None:
    """The C++ compiler that an installation would use: the one that CXX names, or the first on the PATH."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None
