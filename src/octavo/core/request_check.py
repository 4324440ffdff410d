"""Refuses, before queueing, what can never be served, with the arithmetic. It knows nothing of what runs now."""

from __future__ import annotations

from octavo.core.config import SchedulerConfig
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.errors import CapacityError, InvalidRequestError


def check_request(
    request: Request, config: SchedulerConfig, spec: KVSpec, num_blocks: int, vocab_size: int | None
) -> None:
    """Raises CapacityError for what exceeds context or pool, InvalidRequestError for a token id out of range."""
    num_prompt, max_tokens = request.num_prompt_tokens, request.params.max_tokens
    total = num_prompt + max_tokens
    if total > config.max_model_len:
        raise CapacityError(
            f"prompt of {num_prompt} tokens + max_tokens {max_tokens} = {total} tokens > context of "
            f"{config.max_model_len} tokens; shorten the prompt, lower max_tokens or raise --max-model-len",
            param="max_tokens" if num_prompt < config.max_model_len else "prompt",
        )
    stored = total - 1  # the last token is never run
    needed = spec.blocks_for_tokens(stored)
    if needed > num_blocks:
        raise CapacityError(
            f"prompt of {num_prompt} tokens + max_tokens {max_tokens} needs {needed} KV blocks ({stored} tokens to "
            f"keep, {spec.block_size} a block, {len(spec.groups)} KV groups), the pool has {num_blocks}; shorten the "
            f"prompt, lower max_tokens or raise --kv-cache-memory",
            param="max_tokens" if spec.blocks_for_tokens(num_prompt) <= num_blocks else "prompt",
        )
    if vocab_size is not None and max(request.token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"the prompt holds token id {max(request.token_ids)}; ids of this model go from 0 to {vocab_size - 1}",
            param="prompt",
        )
