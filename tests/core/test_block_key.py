"""Block keys mean the same everywhere, and differ wherever the bytes of a block could differ (F2, F6)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from array import array
from hashlib import sha256
from itertools import product
from pathlib import Path

import pytest

from octavo.core.block_key import KEY_BYTES, BlockKeyChain

GOLDEN = Path(__file__).parents[1] / "golden" / "block_keys.json"
SOURCES = Path(__file__).parents[2] / "src"
BASE = {
    "model_digest": "ab" * 32,
    "kv_format": "bf16",
    "block_size": 4,
    "namespace": "tenant/adapter",
    "tokens": [1, 2, 3, 4, 5, 6, 7, 8],
}


def keys_of(case: dict) -> list[str]:
    chain = BlockKeyChain(**{name: case[name] for name in ("model_digest", "kv_format", "block_size")})
    root = chain.root(case["namespace"])
    return [key.hex() for key in (root, *chain.extend(root, array("I", case["tokens"]).tobytes()))]


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_keys_are_the_golden_ones(case: dict) -> None:
    assert keys_of(case) == case["keys"]


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_another_process_gives_the_same_keys(hash_seed: str) -> None:
    code = (
        "from array import array; from octavo.core.block_key import BlockKeyChain as C; "
        f"c = C(model_digest={BASE['model_digest']!r}, kv_format='bf16', block_size=4); "
        f"r = c.root({BASE['namespace']!r}); "
        f"print(*[k.hex() for k in (r, *c.extend(r, array('I', {BASE['tokens']}).tobytes()))])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == keys_of(BASE)


FLIPS = {
    "model_digest": "ab" * 31 + "ac",
    "kv_format": "f32",
    "block_size": 8,
    "namespace": "tenant/adapter2",
    "tokens": [1, 2, 3, 5, 5, 6, 7, 8],
}


@pytest.mark.parametrize("name", FLIPS)
def test_one_component_alone_changes_every_key(name: str) -> None:
    flipped = keys_of({**BASE, name: FLIPS[name]})
    base = keys_of(BASE)
    start = 1 if name == "tokens" else 0  # the root comes before any token
    assert not set(flipped[start:]) & set(base)


def test_a_block_is_named_by_all_tokens_before_it() -> None:
    base, other = keys_of(BASE), keys_of({**BASE, "tokens": [9, 2, 3, 4, 5, 6, 7, 8]})
    assert base[0] == other[0]
    assert base[2] != other[2]


def test_fields_cannot_run_into_each_other() -> None:
    """Moving a character from one field to its neighbour gives another key, as does an empty field."""
    cases = [
        {**BASE, "model_digest": digest, "kv_format": kv_format, "namespace": namespace}
        for digest, kv_format, namespace in product(["ab", "a", ""], ["c", "bc", "abc", ""], ["", "c", "bc"])
    ]
    roots = [keys_of(case)[0] for case in cases]
    assert len(set(roots)) == len(cases)


def test_extending_in_pieces_gives_the_same_chain() -> None:
    chain = BlockKeyChain(model_digest="d", kv_format="bf16", block_size=2)
    tokens = array("I", range(10)).tobytes()
    whole = chain.extend(chain.root(""), tokens)
    first = chain.extend(chain.root(""), tokens[:16])
    assert first + chain.extend(first[-1], tokens[16:]) == whole
    assert {len(key) for key in whole} == {KEY_BYTES}


def test_the_message_is_what_the_docstring_says() -> None:
    chain = BlockKeyChain(model_digest="d", kv_format="bf16", block_size=1)

    def frame(field: bytes) -> bytes:
        return len(field).to_bytes(8, "little") + field

    root = sha256(
        b"\x01" + b"".join(map(frame, (b"octavo block key 1", b"d", b"bf16", (1).to_bytes(8, "little"), b"n")))
    ).digest()
    assert chain.root("n") == root
    assert chain.extend(root, array("I", [7]).tobytes()) == [
        sha256(b"\x02" + frame(root) + frame((7).to_bytes(4, "little"))).digest()
    ]
