"""Needles: lines with a number each, planted in the user's own text at several depths, and asked for at its end.

An answer counts where every token of the number is the most likely one after those before it. All questions of a text
share it as a prefix, so it is read once. It does not know formats.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.certify.probe import Probe
from octavo.certify.setting import Setting
from octavo.core.config import SchedulerConfig
from octavo.kernels.ops import Ops
from octavo.models.family import CausalLM

Encode = Callable[[str], list[int]]

NUM_TEXTS = 4
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of a text
_MOST_TOKENS = 2048
_STEP_TOKENS = 256
_NAMES = (
    "amber", "birch", "cobalt", "dune", "ember", "fjord", "garnet", "heron", "indigo", "juniper",
    "kelp", "lilac", "maple", "nectar", "onyx", "poplar", "quartz", "raven", "saffron", "thistle",
)  # fmt: skip
_SEED = 20


@dataclass(frozen=True, slots=True)
class Question:
    token_ids: tuple[int, ...]  # text, question and answer
    num_answer_tokens: int


def make_questions(token_ids: Sequence[int], encode: Encode, max_model_len: int) -> list[list[Question]]:
    """Of each text its questions, one for each needle; the same for the same text. Empty where there is no room."""
    names, draw = iter(_NAMES), random.Random(_SEED)
    size = min(_MOST_TOKENS, max_model_len) - 64
    found = []
    for number in range(NUM_TEXTS):
        needles = [(next(names), draw.randrange(10_000, 100_000)) for _ in DEPTHS]
        lines = [encode(f"\n\nThe secret number of {name} is {value}.\n\n") for name, value in needles]
        room = size - sum(map(len, lines))
        start = number * room
        text = token_ids[start : start + room]
        if len(text) < room:  # a short text is read again from its beginning
            text = list(token_ids[:room])
        if len(text) < 64:
            return []
        whole: list[int] = []
        cuts = [int(depth * len(text)) for depth in DEPTHS]
        for begin, end, line in zip([0, *cuts], [*cuts, len(text)], [*lines, []], strict=True):
            whole += [*text[begin:end], *line]
        questions = []
        for name, value in needles:
            asked = encode(f"\n\nThe secret number of {name} is")
            answered = encode(f"\n\nThe secret number of {name} is {value}.")
            same = next(i for i, (a, b) in enumerate(zip([*asked, -1], answered, strict=False)) if a != b)
            questions.append(Question((*whole, *answered), len(answered) - same))
        found.append(questions)
    return found


def needle_recall(model: CausalLM, ops: Ops, setting: Setting, texts: Sequence[Sequence[Question]]) -> float:
    """The share of questions that are answered."""
    most = max(len(question.token_ids) for questions in texts for question in questions)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=_STEP_TOKENS, max_model_len=most + 1)
    probe = Probe(model, ops, setting.spec, config, setting.scales)
    found = count = 0
    for number, questions in enumerate(texts):
        for index, question in enumerate(questions):
            name, first = f"text {number}, needle {index}", len(question.token_ids) - question.num_answer_tokens - 1
            probe.add(name, question.token_ids, first)
            is_right = True
            while probe.has_work:
                for heard in probe.step():
                    after = question.token_ids[heard.first + 1 : heard.first + 1 + len(heard.logits)]
                    best = heard.logits.argmax(axis=1).tolist()
                    is_right = is_right and best[: len(after)] == list(after)
            found, count = found + is_right, count + 1
        probe.core.reset_prefix_cache()
    return found / count
