"""The memory of encoded texts: bounded, apart by namespace, the oldest use goes first."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from pathlib import Path

import pytest

from octavo.engine.encoding_cache import EncodingCache, Part
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from tests.engine.encoder_kinds import KINDS


def part(text: str, namespace: str = "") -> Part:
    return Part(namespace, True, text)


def test_ids_are_found_by_text_namespace_and_reading() -> None:
    cache = EncodingCache()
    cache.keep(part("a"), array("I", [1]))
    assert cache.find(part("a")) == array("I", [1])
    assert cache.find(part("a", "other")) is None
    assert cache.find(Part("", False, "a")) is None
    assert cache.find(part("b")) is None


def test_the_oldest_use_goes_first_and_the_bound_holds() -> None:
    cache = EncodingCache(2000)
    for number in range(20):
        cache.keep(part(f"text {number}"), array("I", range(10)))
        cache.find(part("text 0"))
        assert 0 < cache.num_bytes <= 2000
    assert cache.find(part("text 0")) is not None
    assert cache.find(part("text 1")) is None
    assert cache.find(part("text 19")) is not None


def test_what_is_too_large_drives_nothing_out() -> None:
    cache = EncodingCache(2000)
    cache.keep(part("a"), array("I", [1]))
    cache.keep(part("b" * 3000), array("I", [2]))
    assert len(cache) == 1
    assert cache.find(part("a")) is not None


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bytes is -1"):
        EncodingCache(-1)


@pytest.mark.parametrize("length", [1, 40, 900])
@pytest.mark.parametrize("letter", ["a", "\u4e00", "\U0001f44d"])
def test_the_bytes_counted_are_no_less_than_those_used(length: int, letter: str) -> None:
    gc.collect()
    tracemalloc.start()
    try:
        start, _ = tracemalloc.get_traced_memory()
        cache = EncodingCache(1 << 20)
        number = 0
        while number < 20_000:
            text = letter * length + str(number)
            cache.keep(Part(f"n{number}", True, text), array("I", range(max(1, length // 4))))
            number += 1
            if cache.num_bytes > 1_000_000:
                break
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used - start <= 1.05 * (1 << 20)


def test_a_text_of_one_namespace_is_encoded_again_for_another() -> None:
    tokenizer = Tokenizer(KINDS["byte level, gpt-2"](Path()))
    text = "the fox<|turn|>the dog"
    ids = tokenizer.encode(text, namespace="one")
    counts = tokenizer.encoding_counts
    assert tokenizer.encode(text, namespace="one") == ids
    assert tokenizer.encoding_counts.encoded_characters == counts.encoded_characters
    assert tokenizer.encode(text, namespace="two") == ids
    assert tokenizer.encoding_counts.encoded_characters == 2 * counts.encoded_characters
    assert tokenizer.encode(text) == ids  # without a namespace nothing is read
    assert tokenizer.encoding_counts.encoded_characters == 3 * counts.encoded_characters


def test_what_is_returned_is_the_callers_own() -> None:
    tokenizer = Tokenizer(KINDS["byte level, gpt-2"](Path()))
    ids = tokenizer.encode("the fox", namespace="n")
    expected = list(ids)
    ids.append(99)
    assert tokenizer.encode("the fox", namespace="n") == expected


def test_a_talk_of_100_turns_encodes_each_turn_once() -> None:
    """Without an upper bound on the history: what is encoded for a turn is that turn."""
    tokenizer = Tokenizer(KINDS["byte level, gpt-2"](Path()))
    text, most = "", 0
    for number in range(100):
        turn = f"<|turn|>user the fox asks {number}<|end|><|turn|>dog there is nothing to say about {number}<|end|>"
        text += turn
        before = tokenizer.encoding_counts
        assert tokenizer.encode(text, namespace="") == tokenizer.encode(text)
        after = tokenizer.encoding_counts
        encoded = after.encoded_characters - before.encoded_characters - len(text)  # less the whole one
        assert encoded <= len(turn)
        most = max(most, encoded)
    assert most > 0
