"""From the `prompt` of a completion to token ids. It does not know sampling or answers."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.async_engine import AsyncEngine
from octavo.server.api_error import invalid
from octavo.server.fields import checked
from octavo.server.sampling import check_token_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is the prompt as it was sent, or the text of its tokens: what `echo` gives back (None: not asked for)."""

    token_ids: list[int]
    text: str | None


async def read_prompts(
    prompt: object, engine: AsyncEngine, *, vocab_size: int, max_prompts: int, echo: bool, namespace: str
) -> list[Prompt]:
    """A string, a list of token ids, or a list of either. Raises ApiError 400 naming what is wrong."""
    if prompt is None:
        raise invalid(
            "prompt is missing; send a string, a list of token ids, or a list of either", "prompt", "missing_field"
        )
    if isinstance(prompt, str):
        items: list[object] = [prompt]
    elif not isinstance(prompt, list):
        raise invalid("prompt must be a string, a list of token ids, or a list of either", "prompt")
    elif prompt and isinstance(prompt[0], (str, list)):
        items = prompt
    else:
        items = [prompt]
    if len(items) > max_prompts:
        raise invalid(
            f"prompt has {len(items)} prompts; this server takes at most {max_prompts} in one request", "prompt"
        )
    return [await _read(item, engine, vocab_size, echo, namespace) for item in items]


async def _read(item: object, engine: AsyncEngine, vocab_size: int, echo: bool, namespace: str) -> Prompt:
    if isinstance(item, str):
        token_ids = await engine.encode(item, namespace=namespace)
        text = item if echo else None
    else:
        token_ids = checked(item, list[int], at="prompt")
        check_token_ids(token_ids, vocab_size, "prompt")
        text = engine.tokenizer.decode(token_ids) if echo else None
    if not token_ids:
        raise invalid("prompt is empty: it has no tokens; send at least one", "prompt")
    return Prompt(token_ids, text)
