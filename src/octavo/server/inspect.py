"""Endpoints that ask and change little: models, health, KV status and reset, tokens and text, version.

They do not know how a text is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

from octavo.core.kv_spec import KVGroupSpec
from octavo.core.status import GroupBlocks
from octavo.engine.status import EngineStatus
from octavo.server.api_error import ApiError, invalid
from octavo.server.context import Call, ServerContext
from octavo.server.fields import check_names, checked, convert, model_not_found
from octavo.server.messages import read_messages
from octavo.server.reply import JsonReply, Reply
from octavo.server.sampling import check_token_ids
from octavo.server.served_model import ServedModel
from octavo.server.tenant import namespace


@dataclass(frozen=True, slots=True)
class TokenizeFields:
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None


@dataclass(frozen=True, slots=True)
class DetokenizeFields:
    model: str | None = None
    tokens: list[int] | None = None


async def list_models(context: ServerContext, _call: Call) -> Reply:
    return JsonReply({"object": "list", "data": [_model_card(name, context.model) for name in context.model.names]})


async def get_model(context: ServerContext, call: Call) -> Reply:
    name = call.path["model"]
    if name not in context.model.names:
        raise model_not_found(name, context.model.names)
    return JsonReply(_model_card(name, context.model))


async def health(context: ServerContext, _call: Call) -> Reply:
    """200 while requests are taken. It asks nothing of the engine's thread, so a long step does not delay it."""
    state = context.engine.state
    if state == "running":
        return JsonReply({"status": "ok"})
    return JsonReply({"status": state, "reason": context.engine.reason}, status=503)


async def version(_context: ServerContext, _call: Call) -> Reply:
    try:
        return JsonReply({"version": installed_version("octavo")})
    except PackageNotFoundError:  # run from a source tree that was never installed
        return JsonReply({"version": "unknown"})


async def kv_status(context: ServerContext, _call: Call) -> Reply:
    return JsonReply(kv_status_body(await context.engine.status(), context.model))


async def kv_mrc(context: ServerContext, _call: Call) -> Reply:
    """The miss-ratio curve: what caches of other sizes would hit, beside what this one did."""
    curve = await context.engine.cache_curve()
    if curve is None:
        raise ApiError(404, "this server estimates no curve; start it without --no-kv-curve", code="no_curve")
    return JsonReply(
        {
            "num_blocks": curve.num_blocks,
            "block_size": curve.block_size,
            "kv_bytes_per_block": curve.kv_bytes_per_block,
            "lookup_blocks": curve.lookup_blocks,
            "hit_blocks": curve.hit_blocks,
            "hit_rate": curve.hit_rate,
            "curve": [
                {
                    "scale": one.scale,
                    "blocks": one.blocks,
                    "bytes": one.blocks * curve.kv_bytes_per_block,
                    "hit_rate": one.hit_rate,
                }
                for one in curve.estimates
            ],
            "sample": curve.sample,
            "ghost_blocks": curve.ghost_blocks,
        }
    )


async def kv_reset(context: ServerContext, call: Call) -> Reply:
    """Drops what the cache keeps for later; running requests keep their blocks."""
    check_names(call.body)
    return JsonReply({"dropped_blocks": await context.engine.reset_prefix_cache()})


async def tokenize(context: ServerContext, call: Call) -> Reply:
    check_names(call.body, TokenizeFields)
    fields = convert(call.body, TokenizeFields)
    context.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("send either prompt (a string) or messages (a chat)", "prompt", "missing_field")
    own = namespace(call.tenant, None)
    if fields.prompt is not None:
        special = fields.add_special_tokens is not False
        token_ids = await context.engine.encode(fields.prompt, add_special_tokens=special, namespace=own)
    else:
        if fields.add_special_tokens is not None:
            raise invalid("add_special_tokens goes with prompt; in a chat the template decides", "add_special_tokens")
        token_ids = await read_messages(
            fields.messages, context.engine, context.model, context.config.max_messages, own
        )
    return JsonReply({"count": len(token_ids), "max_model_len": context.model.max_model_len, "tokens": token_ids})


async def detokenize(context: ServerContext, call: Call) -> Reply:
    check_names(call.body, DetokenizeFields)
    fields = convert(call.body, DetokenizeFields)
    context.check_model(fields.model)
    if fields.tokens is None:
        raise invalid("tokens is missing; send a list of token ids", "tokens", "missing_field")
    token_ids = checked(fields.tokens, list[int], at="tokens")
    check_token_ids(token_ids, context.model.vocab_size, "tokens")
    tokenizer = context.engine.tokenizer
    text = await context.engine.with_text(
        len(token_ids), lambda: tokenizer.decode(token_ids, skip_special_tokens=False)
    )
    return JsonReply({"prompt": text})


def kv_status_body(status: EngineStatus, model: ServedModel) -> dict[str, object]:
    core = status.core
    return {
        "state": status.state,
        "num_blocks": core.num_blocks,
        "block_size": core.block_size,
        "kv_bytes_per_block": core.kv_bytes_per_block,
        "kv_bytes_per_token": sum(group.bytes_per_token for group in core.kv_groups if group.kind != "tail"),
        "kv_bytes": core.num_blocks * core.kv_bytes_per_block,
        "kv_cache_dtype": model.kv_cache_dtype,
        **{f"kv_{name}": value for name, value in model.kv_setting.items()},
        "free_blocks": core.free_blocks,
        "cached_blocks": core.cached_blocks,
        "used_blocks": core.used_blocks,
        "branch_saved_blocks": core.branch_saved_blocks,
        "branch_peak_saved_blocks": core.branch_peak_saved_blocks,
        "internal_waste_tokens": core.internal_waste_tokens,
        "kv_groups": [_group(one, blocks) for one, blocks in zip(core.kv_groups, core.kv_group_blocks, strict=True)],
        "queries_tokens": core.queries_tokens,
        "hit_tokens": core.hit_tokens,
        "computed_tokens": core.computed_tokens,
        "recomputed_tokens": core.recomputed_tokens,
        "evicted_blocks": core.evicted_blocks,
        "passed_blocks": core.passed_blocks,
        "dropped_tokens": core.dropped_tokens,
        "copied_blocks": core.copies,
        "preemptions": core.preemptions,
        "running": core.running,
        "waiting": core.waiting,
        "degraded": list(model.degraded),
        "memory": _memory(model),
    }


def _memory(model: ServedModel) -> dict[str, int]:
    """What was planned and allocated for the whole process, and the most that was resident so far."""
    peak = {} if model.peak_resident_bytes is None else {"peak_resident_bytes": model.peak_resident_bytes()}
    return {**model.memory, **peak}


def _group(group: KVGroupSpec, blocks: GroupBlocks) -> dict[str, object]:
    return {
        "name": group.name,
        "num_layers": len(group.layer_indices),
        "layers": list(group.layer_indices),
        "num_kv_heads": group.num_kv_heads,
        "head_dim": group.head_dim,
        "kv_format": group.kv_format,
        "kind": group.kind,
        "window": group.window,
        "bytes_per_token": group.bytes_per_token,
        "padding_bytes_per_token": group.padding_bytes_per_token,
        "used_blocks": blocks.used,
        "cached_blocks": blocks.cached,
    }


def _model_card(name: str, model: ServedModel) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "octavo",
        "root": model.name,
        "max_model_len": model.max_model_len,
        "octavo": {
            "digest": model.digest,
            "weights_dtype": model.weights_dtype,
            "kv_cache_dtype": model.kv_cache_dtype,
            "max_request_tokens": model.max_request_tokens,
            "default_sampling": {"temperature": 1.0, **model.default_sampling},
            "has_chat_template": model.chat_template is not None,
        },
    }
