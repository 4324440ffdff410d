"""Fetches a model from a Hugging Face hub, through huggingface_hub and into its own cache.

A record of what was fetched keeps later starts off the network. It knows repositories and file names, not formats.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.errors import DownloadError
from octavo.models.cached_file import digest_of, locked, write_whole

REFERENCE = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<file>[\w.-]+(?:/[\w.-]+)*\.gguf))?")
WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
UNWANTED = ["*/*", "consolidated*"]  # other frameworks' copies of the same weights
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class HubRecord:
    """A finished download: the directory or the .gguf file, and the size of each file that belongs to it."""

    reference: str
    path: str
    sizes: dict[str, int]

    @property
    def is_complete(self) -> bool:
        files = [(Path(self.path) / name if Path(self.path).is_dir() else Path(self.path)) for name in self.sizes]
        return bool(files) and all(
            file.is_file() and file.stat().st_size == size
            for file, size in zip(files, self.sizes.values(), strict=True)
        )


def is_reference(text: str) -> bool:
    """Whether this is written as ORG/NAME or ORG/NAME:FILE.gguf."""
    found = REFERENCE.fullmatch(text)
    return found is not None and ".." not in text


def fetch(reference: str, records: Path) -> Path:
    """The directory, or the .gguf file, of a reference; the network is used only where it is not here yet.

    Raises DownloadError in one sentence.
    """
    file = records / f"{re.sub(r'[/:]', '--', reference)}.json"
    known = read_record(file)
    if known is not None and known.is_complete:
        return Path(known.path)
    with locked(records):
        path = _download(reference)
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for each in files:
            _check_digest(each)
        record = HubRecord(reference, str(path), {each.name: each.stat().st_size for each in files if each.is_file()})
        write_whole(file, json.dumps(asdict(record), indent=1).encode())
    return path


def read_record(file: Path) -> HubRecord | None:
    """A record as it was written; None where there is none that can be read."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        sizes = {str(name): int(size) for name, size in values["sizes"].items()}
        return HubRecord(str(values["reference"]), str(values["path"]), sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _download(reference: str) -> Path:
    found = REFERENCE.fullmatch(reference)
    assert found is not None
    repository, file = found["repository"], found["file"]
    import huggingface_hub

    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        path = Path(huggingface_hub.snapshot_download(repository, allow_patterns=WANTED, ignore_patterns=UNWANTED))
        if any(path.glob("*.safetensors")):
            return path
        offered = [name for name in huggingface_hub.list_repo_files(repository) if name.endswith(".gguf")]
    except Exception as error:  # the library lets errors of its HTTP client through as well
        raise DownloadError(reason_of(reference, error)) from error
    if offered:
        raise DownloadError(
            f"{repository} has no safetensors files but these GGUF files: {', '.join(offered[:20])}; name one, as "
            f"{repository}:{offered[0]}"
        )
    raise DownloadError(f"{repository} has neither safetensors nor GGUF files, which are what octavo reads")


def reason_of(reference: str, error: Exception) -> str:
    """Why the hub did not give what was asked for, in one sentence with a cure."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        why = "its owner asks for an agreement first; accept it on the hub and log in with `hf auth login`"
    elif kind == "RepositoryNotFoundError":
        why = "the hub has no such repository, or it is private; check the name, or log in with `hf auth login`"
    elif kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
        why = "the repository has no such file; check the name"
    elif kind in ("LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "ProxyError", "OfflineModeIsEnabled"):
        why = "the hub cannot be reached and the model is not in its local cache; check the network"
    else:
        why = f"{kind}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no more is known'}"
    return f"{reference} could not be fetched: {why}; a directory, a .gguf file or an alias works without the hub"


def _check_digest(file: Path) -> None:
    """The hub's cache names a large file by its SHA-256; a file that is not what its name says is removed."""
    blob = file.resolve()
    if SHA256.fullmatch(blob.name) and digest_of(blob) != blob.name:
        blob.unlink()
        file.unlink(missing_ok=True)
        raise DownloadError(f"{file.name} does not have its SHA-256 {blob.name}: it was removed; fetch it again")
