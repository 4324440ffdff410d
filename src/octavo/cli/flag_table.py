"""What a flag says of itself: help, metavar, special spelling or reader, by the name of the config field it sets.

A field that is no flag stands in `NOT_FLAGS` with the reason. It does not know click, nor which command has which flag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.cli.units import parse_bytes

OF_THE_FIELD = object()  # a flag's default, where it is the field's


@dataclass(frozen=True, slots=True)
class Flag:
    help: str
    metavar: str | None = None
    parse: Callable[[str], object] | None = (
        None  # text -> value; ValueError says what is wrong. None: by the field's type
    )
    spelling: str | None = None  # None: the field's name with dashes
    default: object = OF_THE_FIELD
    is_one_text: bool = False  # a tuple that `parse` makes of one text; else such a flag may be repeated
    is_advised: bool = False  # a model may say its own value, which goes before the field's default


def parse_logit_bias(text: str) -> tuple[int, float]:
    """`42:-1.5` as token id and bias. Raises ValueError."""
    token_id, _, bias = text.partition(":")
    try:
        return int(token_id), float(bias)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a token id and a bias; write 42:-1.5") from error


def parse_early_stopping(text: str) -> bool | str:
    """`true`, `false` or `never`. Raises ValueError."""
    values: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is none of true, false and never")
    return values[text.lower()]


def parse_layers(text: str) -> tuple[int, ...]:
    """`0-3,7` as layer indices, ascending. Raises ValueError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isdecimal() and len(end) < 6 for end in ends) or int(ends[0]) > int(ends[1]):
            raise ValueError(f"{part!r} is no layer and no range of layers; write 0-3,7")
        found.update(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(found))


# config class -> field -> why it is no flag
NOT_FLAGS: dict[str, dict[str, str]] = {
    "EngineConfig": {
        "eos_token_ids": "comes with the model",
        "inline_characters": "a matter of the event loop, without effect on answers",
    },
    "SamplingParams": {
        "use_beam_search": "`generate --beams` sets it together with the width",
        "prompt_logprobs": "for requests over HTTP and in Python",
        "kv_policy": "the flag of the model says it for all requests of a command",
    },
}

FLAGS: dict[str, Flag] = {
    # the scheduler
    "max_num_seqs": Flag("Requests that run at once."),
    "max_num_batched_tokens": Flag(
        "Tokens computed in one step: what bounds how long a long prompt holds up the others."
    ),
    "max_num_prefill_tokens": Flag(
        "Tokens of a step in which a prompt is alone, holding up nobody. [default: 4 times --max-num-batched-tokens]",
        default=None,
    ),
    "max_model_len": Flag(
        "Prompt and output of a request together, in tokens. [default: the model's own length]", default=None
    ),
    "enable_prefix_caching": Flag("Let requests that begin alike share the blocks of their common beginning."),
    "enable_kv_cache": Flag(
        "Without it everything is computed again for every token, with the same bits: what the cache saves.",
        spelling="--kv-cache/--no-kv-cache",
    ),
    "kv_policy": Flag(
        "Which tokens of a text are kept: all, streaming:SINKS,RECENT,PIECE (its first SINKS and its last RECENT to "
        "RECENT + PIECE, in whole blocks), h2o:BUDGET,RECENT,PIECE (the BUDGET to BUDGET + PIECE that got most "
        "attention, the last RECENT among them) or snapkv:BUDGET,WINDOW,KERNEL (of a prompt, its last WINDOW tokens "
        "and those that these look at); what is dropped is not read again.",
        "POLICY",
    ),
    # the executor
    "weights_dtype": Flag(
        "auto, f32, bf16, int8 or int4. auto is f32 where the model is f32, int8 where a GGUF file has mostly "
        "blocks of q8_0, q4_0 or q4_1 (held exactly), else bf16.",
        "DTYPE",
    ),
    "kv_cache_dtype": Flag(
        "auto, f32, bf16, f16, fp8_e4m3, fp8_e5m2, int8, k8v4, int4 or certified. auto is the model's own; bf16 "
        "if quantised. certified is what `octavo certify` chose.",
        "DTYPE",
    ),
    "certificate": Flag(
        "What --kv-cache-dtype certified goes by. [default: the newest of `octavo certify` that matches]", "FILE"
    ),
    "kv_cache_skip_layers": Flag(
        "Layers whose K and V stay as auto would have them: 0-3,7.",
        "LAYERS",
        parse_layers,
        spelling="--kv-cache-dtype-skip-layers",
        is_one_text=True,
    ),
    "kv_cache_scales": Flag(
        "Calibrated scales of an fp8 or int8 cache, of `octavo calibrate`; none runs uncalibrated. [default: the file "
        "beside the model]",
        "FILE",
    ),
    "kv_cache_memory": Flag(
        "Size of the KV cache: 512MiB, 2GB, ... [default: half of the memory left after the weights, at most 4 GiB]",
        "BYTES",
        parse_bytes,
    ),
    "block_size": Flag("Tokens of a block of the KV cache: a multiple of 16, at most 256."),
    "threads": Flag("Threads of the kernels; 0 is one per core that this process may use."),
    "instruction_set": Flag("auto, or one of those that `octavo doctor` lists.", "NAME"),
    # the engine
    "max_waiting": Flag("Requests that may wait; one more is refused with HTTP 429."),
    "stream_interval_ms": Flag(
        "With more than four open requests, send text every so many milliseconds at most; with more than eight, in "
        "proportion less often, up to ten times (first tokens and ends at once). 0 sends every token by itself.",
        "MILLISECONDS",
    ),
    # the server
    "host": Flag("Address to listen on; 0.0.0.0 is every interface."),
    "port": Flag("Port to listen on."),
    "api_keys": Flag(
        "A key that opens the server; may be repeated. OCTAVO_API_KEY does the same, unseen in the process list.",
        "KEY",
        spelling="--api-key",
    ),
    "shutdown_timeout_s": Flag(
        "Seconds that running requests are given to end after SIGTERM or Ctrl-C.",
        "SECONDS",
        spelling="--shutdown-timeout",
    ),
    "body_timeout_s": Flag(
        "Seconds in which the body of an HTTP request must arrive.", "SECONDS", spelling="--body-timeout"
    ),
    "max_body_bytes": Flag("Size of the body of one HTTP request, at most: 16MiB, ...", "BYTES", parse_bytes),
    "max_prompts": Flag("Prompts in one request, at most."),
    "max_branches": Flag("Branches of one request (prompts times n, or best_of), at most."),
    "max_messages": Flag("Messages in one chat request, at most."),
    "max_json_depth": Flag("Depth of the JSON of one request, at most."),
    "access_log": Flag("Log every HTTP request."),
    # sampling
    "max_tokens": Flag("Tokens of the answer, at most.", default=None),
    "min_tokens": Flag("Tokens of the answer, at least: until then no end is accepted."),
    "temperature": Flag("0 takes the most likely token always; higher is more varied.", is_advised=True),
    "top_k": Flag("Draw from so many most likely tokens only; 0 is all.", is_advised=True),
    "top_p": Flag("Draw from the most likely tokens that together have this probability.", is_advised=True),
    "min_p": Flag("Draw from tokens with at least this share of the most likely one's probability.", is_advised=True),
    "repetition_penalty": Flag(
        "Above 1: what is in the prompt or the answer already becomes less likely.", is_advised=True
    ),
    "presence_penalty": Flag("Taken from the logit of each token that the answer has already."),
    "frequency_penalty": Flag("Taken from the logit of a token for each time that the answer has it already."),
    "logit_bias": Flag("Add BIAS to the logit of token ID; may be repeated.", "ID:BIAS", parse_logit_bias),
    "seed": Flag("The same seed gives the same answer. [default: a random one]"),
    "stop": Flag("End the answer before this text; may be repeated.", "TEXT"),
    "stop_token_ids": Flag("End the answer with this token; may be repeated.", "ID", spelling="--stop-token-id"),
    "ignore_eos": Flag("Do not end where the model wants to."),
    "logprobs": Flag("Report the log-probability of each token and this many of the most likely ones (needs --json)."),
    "include_stop_str_in_output": Flag("Keep the text that ended the answer."),
    "n": Flag("Answers to each prompt. They share the blocks of the prompt."),
    "best_of": Flag("Branches that run for each prompt; those --n with the most likely tokens are the answers."),
    "length_penalty": Flag("Beam search: a score is divided by the length to this power; above 0 favours long texts."),
    "early_stopping": Flag(
        "Beam search: true ends with as many texts as beams; false and never look on for better ones.",
        "MODE",
        parse_early_stopping,
    ),
}
