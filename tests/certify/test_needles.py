"""Needles are where they are said to be, and an answer counts only where every token of it is the most likely one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.certify.needles import DEPTHS, NUM_TEXTS, Question, make_questions, needle_recall
from octavo.certify.setting import Setting
from octavo.certify.speed import decode_tokens_per_s
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.one_text import OneText
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model, open_model
from tests.models.tiny_models import make_tiny_model

IDS = [(7 * index + index * index) % 250 + 3 for index in range(4000)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_directory(path)


def encode_with(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_every_needle_is_in_its_text_at_its_depth_and_is_asked_for(tokenizer: Tokenizer) -> None:
    texts = make_questions(IDS, lambda text: encode_with(tokenizer, text), 1024)
    assert [len(questions) for questions in texts] == [len(DEPTHS)] * NUM_TEXTS
    seen = set()
    for questions in texts:
        for depth, question in zip(DEPTHS, questions, strict=True):
            assert len(question.token_ids) <= 1024
            whole = tokenizer.decode(question.token_ids, skip_special_tokens=False)
            asked = whole[whole.rindex("The secret number of ") :]
            needle = asked.removesuffix(".")
            assert whole.count(needle) == 2, "planted once, and asked for"
            assert whole.index(needle) / len(whole) == pytest.approx(depth, abs=0.12)
            answer = tokenizer.decode(question.token_ids[-question.num_answer_tokens :])
            assert needle.split()[-1] in answer
            assert "is" not in answer
            seen.add(needle)
    assert len(seen) == NUM_TEXTS * len(DEPTHS)
    again = make_questions(IDS, lambda text: encode_with(tokenizer, text), 1024)
    assert again == texts


def test_a_short_text_is_used_again_and_no_room_gives_none(tokenizer: Tokenizer) -> None:
    def encode(text: str) -> list[int]:
        return encode_with(tokenizer, text)

    assert len(make_questions(IDS[:900], encode, 1024)) == NUM_TEXTS
    assert make_questions(IDS[:40], encode, 1024) == []
    assert make_questions(IDS, encode, 128) == []


def test_an_answer_counts_where_each_of_its_tokens_is_the_best(path: Path) -> None:
    ops = NativeOps(1)
    model = load_model(open_model(path), ops, "f32")
    setting = Setting.of(model, "f32")
    text = OneText(model, setting.spec.groups, 80)
    known = IDS[:60]
    for _ in range(3):  # what the model says by itself
        known = [*known, int(text.run(known, len(known) - 1)[0].argmax())]
    right = Question(tuple(known), 3)
    for wrong_at in (-1, -2, -3):
        wrong = list(known)
        wrong[wrong_at] = (wrong[wrong_at] + 1) % 250
        assert needle_recall(model, ops, setting, [[right, Question(tuple(wrong), 3)], [right]]) == pytest.approx(2 / 3)
    assert needle_recall(model, ops, setting, [[right]]) == 1.0


def test_speed_is_counted_over_the_steps_that_decode_all_texts(path: Path) -> None:
    ops = NativeOps(1)
    model = load_model(open_model(path), ops, "f32")
    ticks = iter(np.arange(0, 10_000, 0.5).tolist())
    found = decode_tokens_per_s(model, ops, Setting.of(model, "bf16"), IDS[:400], lambda: next(ticks))
    assert found == pytest.approx(4 / 0.5)
