"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. Read it top to bottom.

It knows operations and weights; it does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, AttentionProjection, KVLayer, Ops
from octavo.models.config import ModelConfig
from octavo.models.rope import RopeTables, inverse_frequencies
from octavo.models.weights import ModelWeights

_SCRATCH_ROWS_STEP = 64


class LlamaModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = weights.num_bytes
        self._weights = weights
        self._ops = ops
        frequencies = inverse_frequencies(config.rope, config.head_dim, weights.rope_divisors)
        self._rope = RopeTables(frequencies, config.max_position_embeddings)
        self._scratch = _Scratch()
        self._projections = tuple(
            AttentionProjection(layer.attention_norm, config.rms_norm_eps, layer.qkv, layer.q_norm, layer.k_norm)
            for layer in weights.layers
        )

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        """One group: all layers attend to everything."""
        config = self.config
        layers = tuple(range(config.num_layers))
        return (KVGroupSpec("full", layers, config.num_kv_heads, config.head_dim, kv_format),)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """Run the rows of a step, write their K and V, and give the logits of some rows.

        token_ids [num_tokens]; kv_layers one per layer; logits_rows [n] indices into token_ids.
        Returns a new array [n, vocab_size].
        """
        ops, config, weights = self._ops, self.config, self._weights
        eps, scale = config.rms_norm_eps, config.head_dim**-0.5
        rope = self._rope.upto(_num_positions(batch))
        hidden = self._scratch.rows("hidden", len(token_ids), config.hidden_size)
        q = self._scratch.heads("q", len(token_ids), config.num_heads, config.head_dim)
        attended = self._scratch.heads("attended", len(token_ids), config.num_heads, config.head_dim)
        flat = attended.reshape(len(token_ids), -1)

        ops.embedding(weights.embedding, token_ids, hidden)
        layers = zip(weights.layers, self._projections, kv_layers, strict=True)
        for index, (layer, projection, kv) in enumerate(layers):
            ops.attention_input(hidden, projection, batch, rope, kv, q)

            if index == config.num_layers - 1 and not _are_all_rows(logits_rows, len(token_ids)):
                # K and V are written for every row; past this point only rows that become logits are needed.
                hidden, q, batch = hidden[logits_rows], q[logits_rows], _one_row_each(batch, logits_rows)
                attended, flat = attended[: len(hidden)], flat[: len(hidden)]
                if not len(hidden):
                    break

            ops.paged_attention(q, batch, kv, scale, attended)
            ops.linear(flat, layer.output, hidden, accumulate=True)
            ops.gated_mlp(hidden, layer.mlp_norm, eps, layer.gate_up, layer.down)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.norm_linear(hidden, weights.final_norm, eps, weights.head, logits)
        return logits


class _Scratch:
    """Buffers for activations, kept between calls and grown on demand."""

    def __init__(self) -> None:
        self._buffers: dict[str, F32] = {}

    def rows(self, name: str, num_rows: int, size: int) -> F32:
        """[num_rows, size], with whatever the last call left in it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_rows:
            capacity = -(-num_rows // _SCRATCH_ROWS_STEP) * _SCRATCH_ROWS_STEP
            buffer = self._buffers[name] = np.empty((capacity, size), np.float32)
        return buffer[:num_rows]

    def heads(self, name: str, num_rows: int, num_heads: int, head_dim: int) -> F32:
        return self.rows(name, num_rows, num_heads * head_dim).reshape(num_rows, num_heads, head_dim)


def _num_positions(batch: AttentionBatch) -> int:
    return int((batch.start_position + np.diff(batch.query_start)).max(initial=0))


def _are_all_rows(logits_rows: I32, num_tokens: int) -> bool:
    return len(logits_rows) == num_tokens and bool((logits_rows == np.arange(num_tokens)).all())


def _one_row_each(batch: AttentionBatch, rows: I32) -> AttentionBatch:
    """The same positions of the same sequences, each of the given rows as a sequence of one row."""
    sequence = np.searchsorted(batch.query_start, rows, side="right") - 1
    position = batch.start_position[sequence] + rows - batch.query_start[sequence]
    return AttentionBatch(
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        start_position=position.astype(np.int32),
        block_tables=batch.block_tables.take(sequence, axis=1),
    )
