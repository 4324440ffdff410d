"""A model and a cache of its own for one text at a time, without scheduler: for measures that need nobody beside them.

It does not know what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.executor.kv_scales import KVScales, scales_in_use
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.ops import F32, I32, AttentionBatch, HeardQueries
from octavo.kv_formats.layout import read_tokens
from octavo.models.family import CausalLM

BLOCK_SIZE = 16
CHUNK_TOKENS = 128


class OneText:
    """Every token of a text keeps its K and V, also behind a window; each text starts from an empty cache."""

    def __init__(
        self, model: CausalLM, groups: Sequence[KVGroupSpec], max_tokens: int, scales: KVScales | None = None
    ) -> None:
        self._model = model
        spec, num_blocks = KVSpec(tuple(groups), BLOCK_SIZE), -(-max_tokens // BLOCK_SIZE)
        scales = scales_in_use(scales, model, spec)
        self._storage = KVStorage(spec, len(groups) * num_blocks, scales=scales)
        self._tables = np.arange(len(groups) * num_blocks, dtype=np.int32).reshape(len(groups), 1, num_blocks)
        self.spec = spec

    def run(self, token_ids: Sequence[int], first_logits: int = 0, heard: HeardQueries | None = None) -> F32:
        """Logits of the tokens from `first_logits` on: [len(token_ids) - first_logits, vocab_size].

        heard: what the queries of the text are added to.
        """
        return np.concatenate([logits for _, logits in self.chunks(token_ids, first_logits, heard)])

    def chunks(
        self, token_ids: Sequence[int], first_logits: int = 0, heard: HeardQueries | None = None
    ) -> Iterator[tuple[int, F32]]:
        """The same bit by bit: the position of the first row, and rows [up to CHUNK_TOKENS, vocab_size], the
        caller's to change.
        """
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            ids = np.array(token_ids[start : start + CHUNK_TOKENS], np.int32)
            query_start, position = np.array([0, len(ids)], np.int32), np.array([start], np.int32)
            batch = AttentionBatch(query_start, position, self._tables, heard=heard)
            wanted = np.arange(max(0, first_logits - start), len(ids), dtype=np.int32)
            rows: I32 = wanted if len(wanted) else np.array([len(ids) - 1], np.int32)
            logits = self._model.forward(ids, batch, self._storage.layers, rows)
            if len(wanted):
                yield start + int(wanted[0]), logits

    def read(self, layer_index: int, num_tokens: int) -> tuple[F32, F32]:
        """K and V of the text's first tokens, each [num_kv_heads, num_tokens, head_dim]; for layers of pairs."""
        layer = self._storage.layers[layer_index]
        return read_tokens(layer, self._tables[layer.group, 0], num_tokens)

    @property
    def head_shapes(self) -> list[tuple[int, int]]:
        """Of each layer the KV heads and the numbers of one."""
        return [(layer.num_kv_heads, layer.head_dim) for layer in self._storage.layers]

    @property
    def num_layers(self) -> int:
        return len(self._storage.layers)
