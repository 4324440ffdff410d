"""What a hub says of a model before its weights: its config, and the companion of it. Needs the hub's own library.

It fetches small JSON files only; weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import DownloadError
from octavo.models.hub_repository import reason_of
from octavo.models.json_file import read_json


@dataclass(frozen=True, slots=True)
class HubHeaders:
    """`stored_parameters`: numbers by dtype, as the headers of the safetensors files say; {} where there are none."""

    config: Mapping[str, Any]
    companion: Mapping[str, Any] | None
    stored_parameters: Mapping[str, int]


def fetch_headers(repository: str) -> HubHeaders:
    """The config of ORG/NAME. DownloadError, with its reason, where the hub does not give it."""
    import huggingface_hub

    try:
        config = read_json(Path(huggingface_hub.hf_hub_download(repository, "config.json")))
    except Exception as error:  # the library lets errors of its HTTP client through as well
        raise DownloadError(reason_of(f"{repository}:config.json", error)) from error
    return HubHeaders(config, _companion(repository), _stored(repository))


def _companion(repository: str) -> Mapping[str, Any] | None:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return read_json(Path(huggingface_hub.hf_hub_download(repository, "hf_quant_config.json")))
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise DownloadError(reason_of(f"{repository}:hf_quant_config.json", error)) from error


def _stored(repository: str) -> Mapping[str, int]:
    """By range requests for the headers alone; a repository without safetensors has none."""
    import huggingface_hub
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        counted = huggingface_hub.get_safetensors_metadata(repository).parameter_count
        return {str(dtype): count for dtype, count in counted.items()}
    except NotASafetensorsRepoError:
        return {}
    except Exception as error:
        raise DownloadError(reason_of(f"{repository} (headers of its weights)", error)) from error
