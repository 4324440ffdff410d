"""Refuses, before queueing, what can never be served, with the arithmetic. It knows nothing of what runs now."""

from __future__ import annotations

from octavo.core.config import SchedulerConfig
from octavo.core.keep_policy import chooses
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.errors import CapacityError, InvalidRequestError


def check_request(
    request: Request, config: SchedulerConfig, spec: KVSpec, num_blocks: int, vocab_size: int | None
) -> None:
    """Raises CapacityError for what exceeds context or pool, InvalidRequestError for a token id out of range."""
    num_prompt, max_tokens = request.num_prompt_tokens, request.params.max_tokens
    _check_branches(request, config, vocab_size)
    _check_keep(request, spec)
    total = num_prompt + max_tokens
    if total > config.max_model_len:
        raise CapacityError(
            f"prompt of {num_prompt} tokens + max_tokens {max_tokens} = {total} tokens > context of "
            f"{config.max_model_len} tokens; shorten the prompt, lower max_tokens or raise --max-model-len",
            param="max_tokens" if num_prompt < config.max_model_len else "prompt",
        )
    stored = request.num_slots(total - 1)  # the last token is never run
    step_tokens = config.max_num_batched_tokens
    needed = spec.blocks_for_tokens(stored, step_tokens)
    if request.params.num_branches > 1:
        _check_room(request, config, spec, num_blocks)
    if needed > num_blocks:
        raise CapacityError(
            f"prompt of {num_prompt} tokens + max_tokens {max_tokens} needs {needed} KV blocks ({stored} tokens to "
            f"keep, {_block_words(spec, step_tokens)}), the pool has {num_blocks}; shorten the "
            f"prompt, lower max_tokens or raise --kv-cache-memory",
            param="max_tokens" if spec.blocks_for_tokens(num_prompt, step_tokens) <= num_blocks else "prompt",
        )
    if vocab_size is not None and max(request.token_ids) >= vocab_size:
        raise InvalidRequestError(
            f"the prompt holds token id {max(request.token_ids)}; ids of this model go from 0 to {vocab_size - 1}",
            param="prompt",
        )


def _check_keep(request: Request, spec: KVSpec) -> None:
    if request.keep is None:
        return
    if request.params.num_branches > 1 or request.params.use_beam_search:
        raise InvalidRequestError(
            f"kv_policy {request.keep} drops tokens of one text; it goes with n 1 and without beam search", param="n"
        )
    why = spec.why_not(chooses=chooses(request.keep))
    if why is not None:
        raise InvalidRequestError(f"kv_policy {request.keep} drops tokens, but this model {why}")


def _check_branches(request: Request, config: SchedulerConfig, vocab_size: int | None) -> None:
    params = request.params
    width, name = params.num_branches, "n" if params.best_of is None else "best_of"
    if width > config.max_num_seqs:
        raise CapacityError(
            f"{name} is {width}, but at most {config.max_num_seqs} requests run at once and each branch is one; lower "
            f"{name} or raise --max-num-seqs",
            param=name,
        )
    candidates = max(2, 1 + len(request.stop_token_ids)) * width
    if params.use_beam_search and vocab_size is not None and candidates > vocab_size:
        raise InvalidRequestError(
            f"a beam search of width {width} with {len(request.stop_token_ids)} end tokens looks at {candidates} next "
            f"tokens, the model has {vocab_size}; lower {name}",
            param=name,
        )


def _check_room(request: Request, config: SchedulerConfig, spec: KVSpec, num_blocks: int) -> None:
    """Whether the branches fit when all of them are as long as they may be, and share no more than the prompt."""
    params = request.params
    width, name = params.num_branches, "n" if params.best_of is None else "best_of"
    num_prompt, stored = request.num_prompt_tokens, request.num_prompt_tokens + params.max_tokens - 1
    step_tokens, is_shared = config.max_num_batched_tokens, config.enable_kv_cache
    shared, own = spec.branch_blocks(stored, num_prompt if is_shared else 0, step_tokens, width)
    if shared + width * own > num_blocks:
        raise CapacityError(
            f"prompt of {num_prompt} tokens + {width} branches x max_tokens {params.max_tokens} need {shared} shared "
            f"KV blocks + {width} x {own} = {shared + width * own} ({stored} tokens to keep in each branch, "
            f"{_block_words(spec, step_tokens)}), the pool has {num_blocks}; lower {name} or "
            f"max_tokens, shorten the prompt or raise --kv-cache-memory",
            param=name,
        )


def _block_words(spec: KVSpec, step_tokens: int) -> str:
    words = f"{spec.block_size} a block, {len(spec.groups)} KV groups"
    if not spec.has_windows:
        return words
    windows = sorted({group.window for group in spec.groups if group.window is not None})
    beside = " and ".join(str(window) for window in windows)
    return f"{words}, of those with a window only {beside} and the {step_tokens} of a step"
