"""From a model reference and the values of flags to a model that answers. With `octavo.llm` it joins the rooms.

It does not know what will be asked of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import config_from
from octavo.cli.model_cache import cache_dir, resolve_model
from octavo.cli.progress import progress_bar
from octavo.core.config import SchedulerConfig
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError
from octavo.executor.config import ExecutorConfig

if TYPE_CHECKING:
    from octavo.engine.chat_template import ChatTemplate
    from octavo.llm import LoadedModel

HOW_TO_DRAW = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The flags of a command that loads a model, read and checked; nothing is loaded yet."""

    scheduler: SchedulerConfig  # its max_model_len counts only where one was asked for
    max_model_len: int | None
    executor: ExecutorConfig
    chat_template: str | None


def check_flags(values: Mapping[str, Any]) -> ModelFlags:
    """Raises ConfigError for a value that no model could have, before anything slow is done."""
    return ModelFlags(
        scheduler=config_from(SchedulerConfig, values),
        max_model_len=values["max_model_len"],
        executor=config_from(ExecutorConfig, values),
        chat_template=read_template(values["chat_template"]),
    )


def check_sampling(values: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for a value that no request could have."""
    room = {} if values["max_tokens"] is not None else {"max_tokens": max(1, values["min_tokens"] or 0)}
    config_from(SamplingParams, values, **room)


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A loaded model with the reference that was given for it."""

    name: str
    loaded: LoadedModel

    def require_chat_template(self) -> ChatTemplate:
        if self.loaded.chat_template is None:
            why = self.loaded.chat_error or "has no chat template; give one with --chat-template FILE"
            raise ConfigError(f"{self.name}: {why}, or use `octavo generate`")
        return self.loaded.chat_template

    def encode(self, text: str) -> list[int]:
        return self.loaded.tokenizer.encode(text, namespace="")

    def encode_question(self, text: str) -> list[int]:
        return self.encode_chat([{"role": "user", "content": text}])

    def encode_chat(self, messages: list[dict[str, object]]) -> list[int]:
        """The template writes the special tokens itself."""
        text = self.require_chat_template().render(messages, add_generation_prompt=True)
        return self.loaded.tokenizer.encode(text, add_special_tokens=False, namespace="")

    def sampling_params(
        self, values: Mapping[str, Any], num_prompt_tokens: int, max_tokens: int | None = None
    ) -> SamplingParams:
        """What the flags say, else the model's own advice, else the defaults.

        `max_tokens` is how long an answer may be where no flag says it; None: as long as there is room.
        """
        unused = HOW_TO_DRAW if values.get("use_beam_search") else ()  # a beam search draws nothing
        advice: dict[str, Any] = {
            name: value
            for name, value in self.loaded.default_sampling.items()
            if values.get(name) is None and name not in unused
        }
        if "top_k" in advice:
            advice["top_k"] = int(advice["top_k"])
        if values["max_tokens"] is None:
            room = max(1, self.loaded.max_model_len - num_prompt_tokens)
            advice["max_tokens"] = room if max_tokens is None else min(room, max_tokens)
        return config_from(SamplingParams, values, **advice)


def load_checked(reference: str, flags: ModelFlags) -> OpenModel:
    """Fetches where needed, loads, and shows progress on a terminal. Raises OctavoError, each with its cure."""
    from octavo.core.config import SchedulerOptions
    from octavo.llm import load  # kernels that are missing are told before anything is fetched

    path = resolve_model(reference)
    options = SchedulerOptions(**{**dataclasses.asdict(flags.scheduler), "max_model_len": flags.max_model_len})
    with progress_bar(f"loading {reference}") as progress:
        loaded = load(
            str(path),
            scheduler=options,
            executor=flags.executor,
            chat_template=flags.chat_template,
            cache_dir=cache_dir(),
            progress=progress,
        )
    return OpenModel(reference, loaded)


def read_template(path: Path | None) -> str | None:
    """The text of a user's own template. Raises ConfigError when there is none in it."""
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not UTF-8 text ({error}); give a Jinja file") from error
    if not source.strip():
        raise ConfigError(f"--chat-template {path} is empty; give a Jinja file, or leave the flag out")
    return source
