"""Models from a hub, with huggingface_hub's own functions replaced: no network."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.errors import DownloadError
from octavo.models import hub


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A repository in the hub's cache: files are links to blobs, large ones named by their SHA-256."""
    weights = b"weights" * 100
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    blob = blobs / hashlib.sha256(weights).hexdigest()
    blob.write_bytes(weights)
    (folder / "model.safetensors").symlink_to(blob)
    (folder / "config.json").write_text("{}")
    return folder


def use(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> list[tuple[Any, ...]]:
    """Replace functions of the library; any other use of the network fails. The calls are listed."""
    calls: list[tuple[Any, ...]] = []

    def record(name: str, answer: Any) -> Any:
        def called(*args: Any, **named: Any) -> Any:
            calls.append((name, *args))
            if isinstance(answer, BaseException):
                raise answer
            return answer

        return called

    for name in ("snapshot_download", "hf_hub_download", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, name, record(name, functions.get(name, AssertionError(name))))
    return calls


def test_a_repository_is_fetched_once(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = use(monkeypatch, snapshot_download=str(snapshot))
    assert hub.resolve("org/name", cache_dir=tmp_path) == snapshot
    assert hub.resolve("org/name", cache_dir=tmp_path) == snapshot
    assert calls == [("snapshot_download", "org/name")]
    entry = hub.list_models(tmp_path)[-1]
    assert (entry.name, entry.path, entry.complete, entry.size_bytes) == ("org/name", snapshot, True, 702)


def test_a_file_that_went_missing_is_fetched_again(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = use(monkeypatch, snapshot_download=str(snapshot))
    hub.resolve("org/name", cache_dir=tmp_path)
    (snapshot / "config.json").unlink()
    assert not hub.list_models(tmp_path)[-1].complete
    hub.resolve("org/name", cache_dir=tmp_path)
    assert len(calls) == 2


def test_one_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "m.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    calls = use(monkeypatch, hf_hub_download=str(file))
    assert hub.resolve("org/name:m.Q4_0.gguf", cache_dir=tmp_path) == file
    assert hub.resolve("org/name:m.Q4_0.gguf", cache_dir=tmp_path) == file
    assert calls == [("hf_hub_download", "org/name", "m.Q4_0.gguf")]


def test_a_file_of_another_digest_is_removed(snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, snapshot_download=str(snapshot))
    blob = (snapshot / "model.safetensors").resolve()
    blob.write_bytes(b"damaged")
    with pytest.raises(DownloadError, match=r"model\.safetensors does not have its SHA-256"):
        hub.resolve("org/name", cache_dir=tmp_path)
    assert not blob.exists()
    assert [entry.name for entry in hub.list_models(tmp_path)] == ["smollm2", "gemma3-270m"]


def test_a_repository_of_gguf_files_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, snapshot_download=str(tmp_path), list_repo_files=["README.md", "a.gguf", "b.gguf"])
    with pytest.raises(DownloadError, match=r"these GGUF files: a\.gguf, b\.gguf; name one, as org/name:a\.gguf"):
        hub.resolve("org/name", cache_dir=tmp_path)


def test_a_repository_of_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, snapshot_download=str(tmp_path), list_repo_files=["pytorch_model.bin"])
    with pytest.raises(DownloadError, match="neither safetensors nor GGUF"):
        hub.resolve("org/name", cache_dir=tmp_path)


class GatedRepoError(Exception):
    pass


class RepositoryNotFoundError(Exception):
    pass


class ConnectError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("x"), "the hub cannot be reached"),
        (ConnectError("name or service not known"), "the hub cannot be reached"),
        (GatedRepoError("x"), "asks for an agreement first"),
        (RepositoryNotFoundError("x"), "no such repository"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError(""), "no more is known"),
    ],
)
def test_failures_are_one_sentence(
    error: Exception, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, snapshot_download=error)
    with pytest.raises(DownloadError, match=f"org/name could not be fetched: .*{said}") as caught:
        hub.resolve("org/name", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
