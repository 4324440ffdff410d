"""What the process environment says. The only file of octavo that reads environment variables of its own.

It does not know what the values are used for.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

CACHE_VARIABLE = "OCTAVO_CACHE"
PLATFORM_CACHE_VARIABLE = "XDG_CACHE_HOME"
API_KEY_VARIABLE = "OCTAVO_API_KEY"


def cache_dir() -> Path | None:
    """Where models are kept: the folder of our own variable, else one in the platform's; None: the default place."""
    text = os.environ.get(CACHE_VARIABLE, "")
    if text:
        return Path(text).expanduser()
    base = os.environ.get(PLATFORM_CACHE_VARIABLE, "")
    return Path(base) / "octavo" if os.path.isabs(base) else None  # by its convention a relative one counts for nothing


def api_keys() -> tuple[str, ...]:
    """Keys separated by commas. Better than the flag, which other users can read in the process list."""
    return tuple(key for key in (part.strip() for part in os.environ.get(API_KEY_VARIABLE, "").split(",")) if key)


def compiler() -> str | None:
    """The C++ compiler that an installation would use: the one that CXX names, or the first on the PATH."""
    for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None
