"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. Read it top to bottom.

It knows operations and weights; it does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, AttentionProjection, KVLayer, Ops
from octavo.models.balance import key_scales, positions
from octavo.models.family import Family
from octavo.models.llama_config import GGUF_NAMES, MODEL_TYPES, LlamaConfig, llama_from_gguf, llama_from_json
from octavo.models.llama_weights import ModelWeights, llama_parts, llama_weights
from octavo.models.rope import rope_tables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, weigh


class LlamaModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: LlamaConfig, weights: ModelWeights, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = weights.num_bytes
        self._weights = weights
        self._ops = ops
        self._windows = tuple(config.window_of(index) for index in range(config.num_layers))
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings, weights.rope_divisors)
        self._scratch = Scratch()
        self._projections = tuple(
            AttentionProjection(layer.attention_norm, config.rms_norm_eps, layer.qkv, layer.q_norm, layer.k_norm)
            for layer in weights.layers
        )

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        """One group of the layers that see everything, one of those that see a window."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return build_groups([LayerGeometry(heads, dim, kv_format, window) for window in self._windows])

    def key_scales(self) -> tuple[F32, ...]:
        """As `Family.key_scales`."""
        config, rope = self.config, self._rope.upto(positions(self.config.max_position_embeddings))
        normed = [projection for projection in self._projections if projection.k_norm is not None]
        return tuple(key_scales(self._ops, one, config.num_kv_heads, config.head_dim, rope) for one in normed)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """Run the rows of a step, write their K and V, and give the logits of some rows.

        token_ids [num_tokens]; kv_layers one per layer; logits_rows [n] indices into token_ids.
        Returns a new array [n, vocab_size].
        """
        ops, config, weights = self._ops, self.config, self._weights
        eps, scale = config.rms_norm_eps, config.head_dim**-0.5
        rope = self._rope.upto(num_positions(batch))
        hidden = self._scratch.rows("hidden", len(token_ids), config.hidden_size)
        q = self._scratch.heads("q", len(token_ids), config.num_heads, config.head_dim)
        attended = self._scratch.heads("attended", len(token_ids), config.num_heads, config.head_dim)
        flat = attended.reshape(len(token_ids), -1)

        ops.embedding(weights.embedding, token_ids, hidden)
        layers = zip(weights.layers, self._projections, kv_layers, strict=True)
        for index, (layer, projection, kv) in enumerate(layers):
            ops.attention_input(hidden, projection, batch, rope, kv, q)
            weigh(ops, q, batch, kv, scale, index)

            if index == config.num_layers - 1 and not are_all_rows(logits_rows, len(token_ids)):
                # K and V are written for every row; past this point only rows that become logits are needed.
                hidden, q, batch = hidden[logits_rows], q[logits_rows], one_row_each(batch, logits_rows)
                attended, flat = attended[: len(hidden)], flat[: len(hidden)]
                if not len(hidden):
                    break

            ops.paged_attention(q, batch, kv, scale, attended, window=self._windows[index] or 0)
            ops.linear(flat, layer.output, hidden, accumulate=True)
            ops.gated_mlp(hidden, layer.mlp_norm, eps, layer.gate_up, layer.down)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.norm_linear(hidden, weights.final_norm, eps, weights.head, logits)
        return logits


FAMILY = Family(
    architectures=tuple(MODEL_TYPES.values()),
    model_types=MODEL_TYPES,
    gguf_names=GGUF_NAMES,
    from_json=llama_from_json,
    from_gguf=llama_from_gguf,
    parts=llama_parts,
    build=lambda config, packed, ops: LlamaModel(config, llama_weights(packed, config), ops),
    key_scales=LlamaModel.key_scales,
)
