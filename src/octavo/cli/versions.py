"""Versions of octavo and of what it stands on. It does not import any of them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

NOT_INSTALLED = "not installed"


def octavo_version() -> str:
    found = package_version("octavo")
    return "from a checkout, not installed" if found == NOT_INSTALLED else found


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return NOT_INSTALLED
