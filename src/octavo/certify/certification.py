"""Certifies: measures every format and, where one is too coarse, mixes of layers, and chooses the smallest that holds.

It does not know files, flags or how results are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from octavo.certify.limits import Limits
from octavo.certify.measure import PathResult, measure
from octavo.certify.mixes import Search, find_mixes
from octavo.certify.needles import Encode, make_questions, needle_recall
from octavo.certify.paths import Path, paths_of
from octavo.certify.probe import pool_bytes
from octavo.certify.setting import REFERENCE, Setting
from octavo.certify.speed import decode_tokens_per_s
from octavo.errors import ConfigError, MemoryBudgetError
from octavo.executor.config import SCALED_FORMATS, resolve_kv_format
from octavo.executor.kv_scales import KVScales
from octavo.executor.memory import available_memory_bytes
from octavo.kernels.ops import Ops
from octavo.models.family import CausalLM

SAMPLE_TOKENS = 512  # by which layers are compared
_MOST_MIXES = 2  # of a format, that are measured whole

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is certified, and by what."""

    token_ids: Sequence[int]
    encode: Encode
    formats: tuple[str, ...]
    limits: Limits
    max_model_len: int
    scales: Mapping[str, KVScales]  # of the formats that want some
    clock: Callable[[], float]
    search_mixes: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One setting, measured."""

    setting: Setting
    paths: Mapping[str, PathResult]
    needle_recall: float | None  # None: the text has no room for needles
    tokens_per_s: float
    broken: tuple[str, ...]  # why it is not certified; empty: it is

    @property
    def is_certified(self) -> bool:
        return not self.broken


@dataclass(frozen=True, slots=True)
class Certification:
    reference: Row
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]  # format -> why it was not measured
    chosen: Row | None  # the one with the fewest bytes of those that are certified


def certify(model: CausalLM, ops: Ops, ask: Ask, say: Say = lambda _: None) -> Certification:
    """Raises ConfigError for a text that is too short, also for the length that is to be measured."""
    num_tokens = len(ask.token_ids)
    if num_tokens < 32:
        raise ConfigError(f"the text has {num_tokens} tokens; give one of at least 32, better of thousands")
    if num_tokens < ask.max_model_len - 1:
        raise ConfigError(
            f"a length of {ask.max_model_len} needs a text of {ask.max_model_len - 1} tokens, and this one has "
            f"{num_tokens}; give more of it, or measure a shorter one"
        )
    return _Bench(model, ops, ask, say).run()


class _Bench:
    """One certification: the model, and what all settings are measured on."""

    def __init__(self, model: CausalLM, ops: Ops, ask: Ask, say: Say) -> None:
        self._model, self._ops, self._ask, self._say = model, ops, ask, say
        vocab_size = model.config.vocab_size
        self._paths = paths_of(ask.token_ids, ask.max_model_len, vocab_size)
        self._sample = paths_of(ask.token_ids[:SAMPLE_TOKENS], ask.max_model_len, vocab_size)[:1]
        self._questions = make_questions(ask.token_ids, ask.encode, ask.max_model_len)
        self._reference = Setting.of(model, REFERENCE)

    def run(self) -> Certification:
        settings, left_out = self._settings()
        self._check_memory([self._reference, *settings])
        reference, *rows = self._rows([self._reference, *settings], None)
        if self._ask.search_mixes and reference.is_certified:
            rows += self._mixed_rows(rows, reference)
        certified = [row for row in rows if row.is_certified and reference.is_certified]
        chosen = min(certified, key=lambda row: row.setting.bytes_per_token, default=None)
        return Certification(reference, tuple(rows), left_out, chosen)

    def _check_memory(self, settings: Sequence[Setting]) -> None:
        """All settings of a path have their caches at once. Raises MemoryBudgetError."""
        available = available_memory_bytes()
        for path in self._paths:
            needed = sum(pool_bytes(setting.spec, path.config) for setting in settings)
            if needed > available:
                raise MemoryBudgetError(
                    f"{len(settings)} caches of the path {path.name} need {needed} bytes, and {available} are there; "
                    "measure fewer --formats at once, or a shorter --max-model-len"
                )

    def _settings(self) -> tuple[list[Setting], dict[str, str]]:
        found, left_out = [], {}
        for kv_format in self._ask.formats:
            scales = self._ask.scales.get(kv_format)
            if kv_format in SCALED_FORMATS and scales is None:
                has_latents = any(group.kind != "pair" for group in self._reference.spec.groups)
                why = "latents are stored without scales" if has_latents else "it wants scales (octavo calibrate)"
                left_out[kv_format] = why
                continue
            try:
                found.append(Setting.of(self._model, kv_format, scales))
            except ConfigError as error:
                left_out[kv_format] = str(error)
        return found, left_out

    def _rows(self, settings: Sequence[Setting], reference: Row | None) -> list[Row]:
        """The first setting is the reference, unless its row is there."""
        self._say(f"measuring {', '.join(setting.name for setting in settings)}")
        run = settings if reference is None else [self._reference, *settings]
        measured = measure(self._model, self._ops, run, self._paths, self._say_path)[len(run) - len(settings) :]
        found: list[Row] = []
        of_reference = None if reference is None else reference.needle_recall
        for setting, paths in zip(settings, measured, strict=True):
            recall = needle_recall(self._model, self._ops, setting, self._questions) if self._questions else None
            of_reference = recall if reference is None and not found else of_reference
            broken = self._ask.limits.broken_by(paths, recall, of_reference)
            speed = decode_tokens_per_s(self._model, self._ops, setting, self._ask.token_ids, self._ask.clock)
            found.append(Row(setting, paths, recall, speed, broken))
        return found

    def _say_path(self, path: Path) -> None:
        self._say(f"  {path.name}: {path.num_tokens} tokens with each")

    def _mixed_rows(self, rows: Sequence[Row], reference: Row) -> list[Row]:
        """Mixes of formats that are not certified, where they would be smaller than what is."""
        plain = resolve_kv_format("auto", self._model.config.dtype)
        if plain != REFERENCE and not any(row.is_certified and row.setting.kv_format == plain for row in rows):
            self._say(f"no mixes are looked for: {plain}, in which layers are left, is not measured or not certified")
            return []
        found: list[Row] = []
        for row in sorted(rows, key=lambda one: one.setting.bytes_per_token):
            smallest = min(one.setting.bytes_per_token for one in [reference, *rows, *found] if one.is_certified)
            if row.is_certified or row.setting.bytes_per_token >= smallest:
                continue
            for setting in self._mixes_of(row.setting, smallest)[:_MOST_MIXES]:
                found += self._rows([setting], reference)
                if found[-1].is_certified:
                    break
        return found

    def _mixes_of(self, setting: Setting, fewer_bytes_than: int) -> list[Setting]:
        self._say(f"looking for the layers that {setting.kv_format} is too coarse for")

        def on_sample(settings: Sequence[Setting]) -> list[PathResult]:
            measured = measure(self._model, self._ops, [self._reference, *settings], self._sample)
            return [one["cold"] for one in measured[1:]]

        return find_mixes(
            Search(
                measure=on_sample,
                setting=lambda skipped: Setting.of(self._model, setting.kv_format, setting.scales, skipped),
                num_layers=self._model.config.num_layers,
                limits=self._ask.limits,
                fewer_bytes_than=fewer_bytes_than,
            )
        )
