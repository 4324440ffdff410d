"""POST /v1/completions and /v1/chat/completions: from fields to requests to an answer. It does not know sockets."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.sampling_params import SamplingParams
from octavo.engine.outputs import GenerationRequest
from octavo.errors import InvalidRequestError
from octavo.server.answer import AnswerFormat, AnswerLabel, AnswerShape, event_stream, whole_answer
from octavo.server.api_error import invalid
from octavo.server.chat_format import ChatFormat
from octavo.server.completion_format import CompletionFormat
from octavo.server.context import Call, ServerContext
from octavo.server.echo import Echo
from octavo.server.fields import ChatFields, CommonFields, CompletionFields, check_names, convert, wants_usage
from octavo.server.messages import read_messages
from octavo.server.prompts import read_prompts
from octavo.server.reply import EventReply, JsonReply, Reply
from octavo.server.sampling import TokenLimit, WantedScores, check_branches, priority_of, sampling_params
from octavo.server.tenant import namespace

COMPLETION_MAX_TOKENS = 16  # OpenAI's default


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that is needed to run one call: its prompts, how to sample, and how to write the answer."""

    answer_id: str
    prompts: list[list[int]]
    params: SamplingParams
    answer: AnswerFormat
    include_usage: bool
    params_as_sent: dict[str, str]  # fields that the client knows by another name


async def completions(context: ServerContext, call: Call) -> Reply:
    check_names(call.body, CommonFields, CompletionFields)
    common, fields = convert(call.body, CommonFields), convert(call.body, CompletionFields)
    name = context.check_model(common.model)
    include_usage = wants_usage(common)
    echo = bool(fields.echo)
    limit = TokenLimit(COMPLETION_MAX_TOKENS if common.max_tokens is None else common.max_tokens, "max_tokens")
    scores = WantedScores(fields.logprobs, "logprobs", fields.logprobs if echo else None)
    params = sampling_params(common, context.model, limit, scores)
    prompts = await read_prompts(
        fields.prompt,
        context.engine,
        vocab_size=context.model.vocab_size,
        max_prompts=context.config.max_prompts,
        echo=echo,
        namespace=namespace(call.tenant, common.cache_salt),
    )
    answer_id = f"cmpl-{context.new_id()}"
    answer = CompletionFormat(
        {"id": answer_id, "created": int(context.wall_clock()), "model": name},
        [Echo(prompt, context.engine.tokenizer) for prompt in prompts],
        context.engine.tokenizer,
        num_answers=params.n,
        logprobs=fields.logprobs is not None,
        include_usage=include_usage,
    )
    job = _Job(answer_id, [prompt.token_ids for prompt in prompts], params, answer, include_usage, {})
    return await _run(context, call, common, job)


async def chat_completions(context: ServerContext, call: Call) -> Reply:
    check_names(call.body, CommonFields, ChatFields)
    common, fields = convert(call.body, CommonFields), convert(call.body, ChatFields)
    name = context.check_model(common.model)
    include_usage = wants_usage(common)
    logprobs = _chat_logprobs(fields)
    own = namespace(call.tenant, common.cache_salt)
    prompt = await read_messages(fields.messages, context.engine, context.model, context.config.max_messages, own)
    limit = _chat_limit(common, fields, context, len(prompt))
    params = sampling_params(common, context.model, limit, WantedScores(logprobs, "top_logprobs"))
    answer_id = f"chatcmpl-{context.new_id()}"
    answer = ChatFormat(
        {"id": answer_id, "created": int(context.wall_clock()), "model": name},
        context.engine.tokenizer,
        num_answers=params.n,
        logprobs=logprobs is not None,
        include_usage=include_usage,
    )
    as_sent = {"prompt": "messages", "max_tokens": limit.param or "messages"}
    return await _run(context, call, common, _Job(answer_id, [prompt], params, answer, include_usage, as_sent))


async def _run(context: ServerContext, call: Call, common: CommonFields, job: _Job) -> Reply:
    stream = bool(common.stream)
    check_branches(job.params, len(job.prompts), context.config.max_branches, stream=stream)
    requests = [
        GenerationRequest(
            request_id=f"{job.answer_id}-{index}",
            prompt_token_ids=prompt,
            params=job.params,
            namespace=namespace(call.tenant, common.cache_salt),
            priority=priority_of(common),
            every_token=stream,
        )
        for index, prompt in enumerate(job.prompts)
    ]
    shape = AnswerShape(len(requests), job.params.n)
    label = AnswerLabel(call.request_id, common.user or common.safety_identifier)
    try:
        generation = await context.engine.submit(requests)
    except InvalidRequestError as error:  # it names the engine's word for the field; the client gets its own
        raise type(error)(str(error), param=job.params_as_sent.get(error.param or "", error.param)) from error
    if stream:
        events = event_stream(generation, shape, job.answer, label, include_usage=job.include_usage)
        return EventReply(events, generation.close)
    return JsonReply(await whole_answer(generation, shape, job.answer, label))


def _chat_logprobs(fields: ChatFields) -> int | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise invalid("top_logprobs needs logprobs true", "top_logprobs")
        return None
    return fields.top_logprobs or 0


def _chat_limit(common: CommonFields, fields: ChatFields, context: ServerContext, num_prompt_tokens: int) -> TokenLimit:
    """What was asked for, else all the room that is left: of the context, and of what the pool can hold."""
    old, new = common.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid(f"max_tokens is {old} and max_completion_tokens is {new}; send one of them", "max_tokens")
    if new is not None:
        return TokenLimit(new, "max_completion_tokens")
    if old is not None:
        return TokenLimit(old, "max_tokens")
    room = min(context.model.max_model_len, context.model.max_request_tokens) - num_prompt_tokens
    return TokenLimit(max(room, 1), None)  # a prompt that leaves no room is refused by the core, with the arithmetic
