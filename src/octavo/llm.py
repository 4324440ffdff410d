"""Wires a model, its kernels, its block pool and the core together, and answers prompts from a script.

`load` makes everything that a front end needs, in the order: files, weights, plan, pool, core. `LLM` drives the core in
the caller's own thread. It does not know HTTP, asyncio or the command line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.core.block_manager import BlockManager
from octavo.core.config import SchedulerConfig, SchedulerOptions
from octavo.core.engine_core import EngineCore
from octavo.core.keep_policy import chooses, parse_policy
from octavo.core.kv_groups import format_words
from octavo.core.kv_spec import KVSpec
from octavo.core.request import Request
from octavo.core.request_output import RequestOutput
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler import Scheduler
from octavo.core.sharing import BranchMemory
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.completion import Beam, BeamSearchParams, Completion, completion_of
from octavo.engine.open_request import OpenRequest
from octavo.engine.outputs import GenerationDelta, GenerationRequest
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, EngineStoppedError, InvalidRequestError, ModelError, OctavoError
from octavo.executor.config import ExecutorConfig, lost_precision
from octavo.executor.kv_setting import KVSetting, Running, kv_setting
from octavo.executor.kv_storage import KVStorage
from octavo.executor.layer_formats import cache_spec, skipped_formats
from octavo.executor.memory import available_memory_bytes, check_before_loading, resident_bytes, usable_cores
from octavo.executor.memory_plan import MemoryAccount, account
from octavo.executor.model_executor import ModelExecutor
from octavo.executor.plan import CachePlan, plan_cache
from octavo.executor.random_stream import derive_seed
from octavo.kernels.native import NativeOps
from octavo.models.config import check_context
from octavo.models.families import family_of
from octavo.models.hub import check_runnable, default_cache_dir, resolve
from octavo.models.loader import ModelSource, load_model, open_model
from octavo.models.packed_size import resolve_weights_dtype

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
Prompt = str | Sequence[int]
Message = dict[str, object]
Params = SamplingParams | Sequence[SamplingParams] | None
OnStep = Callable[[tuple[BranchMemory, ...]], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer, and the facts of it that front ends show. Whoever drives `core` owns it."""

    core: EngineCore
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    chat_error: str | None  # why there is no template, where the model's own one cannot be used
    name: str  # the reference that was given
    digest: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: Mapping[str, float]  # the model's own advice, by field of SamplingParams
    plan: CachePlan
    weights_dtype: str
    kv_cache_dtype: str
    instruction_set: str
    num_threads: int
    scheduler_config: SchedulerConfig
    memory: MemoryAccount
    kv_setting: KVSetting
    idle_work: Callable[[], bool] | None = None  # for an engine that has nothing to do (`AsyncEngine`)

    @property
    def max_model_len(self) -> int:
        return self.plan.max_model_len

    @property
    def weights_bytes(self) -> int:
        return self.memory.weights_held_bytes

    @property
    def degraded(self) -> tuple[str, ...]:
        lost_chat = () if self.chat_error is None else (f"there are completions but no chat: {self.chat_error}",)
        return (*self.plan.degraded, *lost_chat, *self.memory.differences())


def load(
    model: str,
    *,
    scheduler: SchedulerOptions | None = None,
    executor: ExecutorConfig | None = None,
    chat_template: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a directory, a .gguf file, an alias or a hub id. `chat_template`: Jinja source, instead of the model's own.

    `cache_dir`: None is ~/.cache/octavo, whatever the environment says. Raises OctavoError, with the cure in its words.
    """
    options, config, base_bytes = scheduler or SchedulerOptions(), executor or ExecutorConfig(), resident_bytes()
    check_runnable(model)
    source = _open(resolve(model, cache_dir=cache_dir, progress=progress), options, config)
    weights_dtype = resolve_weights_dtype(config.weights_dtype, source.config.dtype)
    check_before_loading(source.weights_bytes(weights_dtype), config.kv_cache_memory, available_memory_bytes())
    ops = NativeOps(config.threads or usable_cores(), config.instruction_set)
    running = Running(ops, weights_dtype, options.max_model_len, cache_dir or default_cache_dir())
    setting, longest = kv_setting(config, source, running), source.config.max_position_embeddings
    tokenizer = Tokenizer.from_source(source.tokenizer_source)
    template, chat_error = _open_template(chat_template, source.generation.chat_template, tokenizer)
    loaded = load_model(source, ops, weights_dtype, progress)
    plan = _plan(source, cache_spec(loaded, setting.config(config)), options, config, setting)
    # A context that the pool has lowered is not the scheduler's limit: blocks are, and it names them with their cure.
    storage = KVStorage(plan.spec, plan.num_blocks, scales=setting.scales_of(loaded, plan.spec))
    family, context = family_of(source.config), options.max_model_len or setting.longest_context(longest)
    scheduler_config = options.config(context, in_blocks=family.in_blocks)
    decider = Scheduler(scheduler_config, BlockManager(plan.spec, plan.num_blocks), vocab_size=source.config.vocab_size)
    return LoadedModel(
        core=EngineCore(decider, ModelExecutor(loaded, ops, storage)),
        tokenizer=tokenizer,
        chat_template=template,
        chat_error=chat_error,
        name=model,
        digest=source.digest,
        vocab_size=source.config.vocab_size,
        eos_token_ids=source.generation.eos_token_ids or tokenizer.eos_token_ids,
        default_sampling=source.generation.sampling,
        plan=plan,
        weights_dtype=weights_dtype,
        kv_cache_dtype=format_words(plan.spec.groups),
        instruction_set=ops.instruction_set,
        num_threads=ops.num_threads,
        scheduler_config=scheduler_config,
        memory=account(source, weights_dtype, scheduler_config, base_bytes, ops.num_threads, (storage, loaded)),
        kv_setting=setting,
        idle_work=lambda: family.prepare(loaded, min(context, scheduler_config.most_step_tokens)) or storage.prepare(),
    )


def _open(path: Path, options: SchedulerOptions, config: ExecutorConfig) -> ModelSource:
    """Raises ConfigError for a context or a layer that the model does not have."""
    source = open_model(path)
    skipped_formats(config, source.config.dtype, source.config.num_layers)
    if options.max_model_len is not None:
        check_context(source.config, options.max_model_len)
    return source


def _open_template(
    given: str | None, models_own: str | None, tokenizer: Tokenizer
) -> tuple[ChatTemplate | None, str | None]:
    """The template, or None and what is wrong with the model's own one: it can still continue texts.

    One that was given must work: ModelError.
    """
    if given is not None:
        return ChatTemplate(given, tokenizer.special_tokens), None
    if models_own is None:
        return None, None
    try:
        return ChatTemplate(models_own, tokenizer.special_tokens), None
    except ModelError as error:
        return None, str(error)


def _plan(
    source: ModelSource, spec: KVSpec, options: SchedulerOptions, config: ExecutorConfig, setting: KVSetting
) -> CachePlan:
    """Call it once the weights are loaded: what is available then is what is left for the cache."""
    keep = parse_policy(options.kv_policy)
    if keep is not None and (why := spec.why_not(chooses=chooses(keep))) is not None:
        raise ConfigError(f"kv_policy {keep} drops tokens, but this model {why}; take kv_policy all")
    return plan_cache(
        spec,
        budget_bytes=config.kv_cache_memory,
        available_bytes=available_memory_bytes(),
        asked_model_len=options.max_model_len,
        longest_context=setting.longest_context(source.config.max_position_embeddings),
        step_tokens=options.max_num_batched_tokens,
        most_slots=None if keep is None else keep.most_slots(spec.block_size),
        degraded=(
            *([] if keep is None else [keep.loss(spec.block_size)]),
            *lost_precision(config, source.config.dtype),
            *setting.degraded(source.config.max_position_embeddings, options.max_model_len),
        ),
    )


class LLM:
    """A model for scripts: `LLM("smollm2").generate("Once upon a time", SamplingParams(max_tokens=32))`.

    Not for several threads at once. Prompts of one call run together, batched continuously; the KV cache is kept
    between calls, so prompts that begin alike share what was computed.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        """options: the fields of SchedulerOptions and ExecutorConfig. `seed` is for requests that bring none.

        `cache_dir`, `progress` and what is raised: as in `load`.
        """
        scheduler, executor = _split_options(options)
        self.model: LoadedModel = load(
            model, scheduler=scheduler, executor=executor, cache_dir=cache_dir, progress=progress
        )
        self._seed = seed
        self._numbers = itertools.count()
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answer no more. The memory goes when the last reference to this object does."""
        self._closed = True

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: Params = None, *, on_step: OnStep | None = None
    ) -> list[Completion]:
        """One completion for each prompt (a text, or token ids), in order; with `n` its `alternatives` are the others.

        params: one for all, or one for each prompt; None: the model's own advice. `on_step` is called after each step
        with what the branches of requests that have several hold then. Raises InvalidRequestError, before
        anything runs, for a prompt that cannot be answered (CapacityError, with the arithmetic, if it is too long).
        """
        return self._run(self._encode(prompts), params, on_step)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[list[Beam]]:
        """For each prompt the most likely texts that a beam search finds, best first. Errors as in `generate`."""
        sampling = (params or BeamSearchParams()).sampling_params()
        found = self._run(self._encode(prompts), sampling, on_step)
        for completion in found:
            if completion.error is not None:
                raise OctavoError(f"the search failed: {completion.error}")
        return [
            [Beam(one.text, one.token_ids, one.score or 0.0, one.finish_reason) for one in completion.answers]
            for completion in found
        ]

    def _encode(self, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
        tokenizer = self.model.tokenizer
        return [
            tokenizer.encode(prompt, namespace="") if isinstance(prompt, str) else list(prompt)
            for prompt in _each(prompts)
        ]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[Completion]:
        """The assistant's next message for one conversation, or for each of several. Errors as in `generate`."""
        template = self.model.chat_template
        if template is None:
            why = self.model.chat_error or "has no chat template"
            raise ConfigError(f"{self.model.name}: {why}; or use generate() with a prompt in its own form")
        talks: list[Any] = list(messages) if messages and not isinstance(messages[0], dict) else [messages]
        texts = [template.render(list(talk), add_generation_prompt=True) for talk in talks]
        ids = [self.model.tokenizer.encode(text, add_special_tokens=False, namespace="") for text in texts]
        return self._run(ids, params, on_step)

    def _each_params(self, params: Params, count: int) -> Sequence[SamplingParams]:
        if params is None:
            params = SamplingParams(**self.model.default_sampling)  # type: ignore[arg-type]
        several = [params] * count if isinstance(params, SamplingParams) else list(params)
        if len(several) != count:
            raise InvalidRequestError(f"{len(several)} sampling params for {count} prompts; give one, or as many")
        for one in several:
            if isinstance(one.stop, str):  # it would be taken letter by letter
                raise InvalidRequestError(f"stop is the string {one.stop!r}; give a tuple of strings", param="stop")
            foreign = [token_id for token_id, _ in one.logit_bias if token_id >= self.model.vocab_size]
            if foreign:
                raise InvalidRequestError(
                    f"logit_bias names token {foreign[0]}; this model's ids go from 0 to {self.model.vocab_size - 1}",
                    param="logit_bias",
                )
        return several

    def _run(self, prompts: Sequence[Sequence[int]], params: Params, on_step: OnStep | None) -> list[Completion]:
        if self._closed:
            raise EngineStoppedError("this LLM is closed; make a new one")
        core = self.model.core
        answers: dict[str, _Answer] = {}
        each_params = self._each_params(params, len(prompts))
        try:
            for token_ids, wanted in zip(prompts, each_params, strict=True):
                answer = self._open(token_ids, wanted)
                core.add(answer.request)
                answers[answer.request.request_id] = answer
            while core.has_work:
                for output in core.step():
                    if answers[output.request_id].take(output):
                        core.finish(output.request_id, output.branch)
                if on_step is not None:
                    on_step(core.branch_memory())
        finally:
            if core.has_work:  # whatever stopped this call, the next one finds the core empty
                core.fail_all("the call that it belonged to ended early")
        return [answer.completion() for answer in answers.values()]

    def _open(self, token_ids: Sequence[int], params: SamplingParams) -> _Answer:
        number = next(self._numbers)
        name = f"llm-{number}"
        seed = derive_seed(self._seed, number) if params.seed is None else params.seed
        request = Request(name, token_ids, params, seed=seed, eos_token_ids=self.model.eos_token_ids)
        asked = GenerationRequest(name, token_ids, params, every_token=False)
        return _Answer(request, OpenRequest(asked, lambda: self.model.tokenizer.new_detokenizer(token_ids), seed, 0.0))


class _Answer:
    """What one request got so far."""

    def __init__(self, request: Request, opened: OpenRequest) -> None:
        self.request = request
        self._opened = opened
        self._deltas: list[GenerationDelta] = []

    def take(self, output: RequestOutput) -> bool:
        """Whether the text of this branch is complete, by a stop string, while the core would go on."""
        deltas, is_stopped = self._opened.push(output)
        self._deltas += deltas
        return is_stopped

    def completion(self) -> Completion:
        return completion_of(self._deltas, self._opened.request.params)


def _each(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) and isinstance(prompts[0], Integral):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _split_options(options: dict[str, Any]) -> tuple[SchedulerOptions, ExecutorConfig]:
    of_scheduler = {name: options[name] for name in _names(SchedulerOptions) if name in options}
    of_executor = {name: options[name] for name in _names(ExecutorConfig) if name in options}
    known = (*_names(SchedulerOptions), *_names(ExecutorConfig))
    for name in options:
        if name not in known:
            raise ConfigError(
                f"there is no option {name!r}; there are {', '.join(known)}, seed, cache_dir and progress"
            )
    return SchedulerOptions(**of_scheduler), ExecutorConfig(**of_executor)


def _names(config: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(config))
