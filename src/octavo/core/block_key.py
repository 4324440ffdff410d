"""Names for the content of KV blocks that mean the same in every process, on every machine.

A key is the SHA-256 of everything that the bytes of a block depend on: it chains over the tokens before it, and starts
from namespace, model digest, KV format and block size. Nothing in it is random, salted or taken from the environment.
It does not know blocks or the tree. Whoever looks up by key compares the tokens as well.

Framing: a message is a type byte followed by its fields, each preceded by its length (8 bytes, little-endian); so no
two different lists of fields give the same message, and no root message is a block message.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256

KEY_BYTES = 32
TOKEN_BYTES = 4
_ROOT = b"\x01"
_BLOCK = b"\x02"
_VERSION = b"octavo block key 1"


def _frame(field: bytes) -> bytes:
    return len(field).to_bytes(8, "little") + field


class BlockKeyChain:
    """Keys of the blocks of one model in one KV format, or several: then as `kv_groups.format_words` names them."""

    __slots__ = ("_block_prefix", "_fields", "_token_prefix", "_width")

    def __init__(self, *, model_digest: str, kv_format: str, block_size: int) -> None:
        self._fields = (model_digest.encode(), kv_format.encode(), block_size.to_bytes(8, "little"))
        self._width = block_size * TOKEN_BYTES
        self._block_prefix = _BLOCK + KEY_BYTES.to_bytes(8, "little")
        self._token_prefix = self._width.to_bytes(8, "little")

    def root(self, namespace: str) -> bytes:
        """The key that the first block of a namespace chains from."""
        fields = (_VERSION, *self._fields, namespace.encode("utf-8", "surrogatepass"))
        return sha256(_ROOT + b"".join(map(_frame, fields))).digest()

    def extend(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """Keys of the blocks that follow `parent`; `tokens` are the token ids of whole blocks, machine byte order."""
        if sys.byteorder == "big":
            swapped = array("I", tokens)
            swapped.byteswap()
            tokens = swapped.tobytes()
        width, before, between = self._width, self._block_prefix, self._token_prefix
        keys = []
        for start in range(0, len(tokens), width):
            parent = sha256(before + parent + between + tokens[start : start + width]).digest()
            keys.append(parent)
        return keys
