"""A file in the model cache that is whole or not there.

It is written beside its place, checked, synced and renamed; a record beside it keeps size, time and digest, so that
it is trusted later without reading it again. It does not know where files come from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.errors import DownloadError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What was true of a file when its digest was last computed."""

    size_bytes: int
    modified_ns: int
    sha256: str


def record_path(file: Path) -> Path:
    return file.with_name(file.name + ".json")


def read_record(file: Path) -> FileRecord | None:
    """The record beside a file; None where there is none that can be read."""
    try:
        values = json.loads(record_path(file).read_text(encoding="utf-8"))
        return FileRecord(int(values["size_bytes"]), int(values["modified_ns"]), str(values["sha256"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_unchanged(file: Path, size_bytes: int, sha256: str) -> bool:
    """The cheap check: the record names this digest, and the file has the size and the time of then."""
    record = read_record(file)
    if record is None or record.sha256 != sha256:
        return False
    try:
        status = file.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (record.size_bytes, record.modified_ns) and (
        status.st_size == size_bytes
    )


def is_intact(file: Path, size_bytes: int, sha256: str, progress: Progress | None = None) -> bool:
    """The full check: every byte is read. A file that passes gets a fresh record, where one can be written."""
    try:
        if file.stat().st_size != size_bytes or digest_of(file, progress) != sha256:
            return False
    except OSError:
        return False
    with suppress(OSError):  # a cache on a read-only disk is checked each time
        write_record(file, sha256)
    return True


def digest_of(file: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest, done = hashlib.sha256(), 0
    total = file.stat().st_size
    with file.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def write_record(file: Path, sha256: str) -> None:
    status = file.stat()
    record = FileRecord(status.st_size, status.st_mtime_ns, sha256)
    write_whole(record_path(file), json.dumps(asdict(record), indent=1).encode())


def write_whole(target: Path, data: bytes) -> None:
    """A small file, replaced in one step."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def store(target: Path, chunks: Iterable[bytes], sha256: str) -> None:
    """Write the chunks to `target` in one step, with its record, if they have this digest; else nothing is left.

    Raises DownloadError for another digest. The caller holds the lock of the folder.
    """
    partial = target.with_name(f".{target.name}.partial")
    digest = hashlib.sha256()
    try:
        with partial.open("wb") as out:
            for chunk in chunks:
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != sha256:
            raise DownloadError(
                f"{target.name} has SHA-256 {digest.hexdigest()}, expected {sha256}: what was fetched is not the "
                f"model that octavo knows; nothing of it is kept"
            )
        os.replace(partial, target)
        _sync_folder(target.parent)
        write_record(target, sha256)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process at a time fetches into a folder; the next one waits and then finds the files there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing the file lets the lock go, also when the process dies


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
