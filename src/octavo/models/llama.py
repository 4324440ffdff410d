"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3. Read it top to bottom.

It knows operations and weights; it does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, AttentionProjection, DecoderLayer, DecoderRows, KVLayer, Ops
from octavo.models.balance import key_scales, positions
from octavo.models.decoder import DecoderScratch, run_decoder
from octavo.models.family import Family
from octavo.models.llama_config import GGUF_NAMES, MODEL_TYPES, LlamaConfig, llama_from_gguf, llama_from_json
from octavo.models.llama_weights import LayerWeights, ModelWeights, llama_parts, llama_weights
from octavo.models.rope import rope_tables
from octavo.models.step_rows import num_positions


class LlamaModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: LlamaConfig, weights: ModelWeights, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = weights.num_bytes
        self._weights = weights
        self._ops = ops
        self._windows = tuple(config.window_of(index) for index in range(config.num_layers))
        self._layers = tuple(map(self._layer, weights.layers, self._windows))
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings, weights.rope_divisors)
        self._scratch = DecoderScratch(config.hidden_size, config.num_heads, config.head_dim)

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        """One group of the layers that see everything, one of those that see a window."""
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return build_groups([LayerGeometry(heads, dim, kv_format, window) for window in self._windows])

    def key_scales(self) -> tuple[F32, ...]:
        """As `Family.key_scales`."""
        config, rope = self.config, self._rope.upto(positions(self.config.max_position_embeddings))
        normed = [layer.attention for layer in self._layers if layer.attention.k_norm is not None]
        return tuple(key_scales(self._ops, one, config.num_kv_heads, config.head_dim, rope) for one in normed)

    def prepare(self, num_rows: int) -> bool:
        """As `Family.prepare`."""
        return self._scratch.prepare(num_rows)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """Run the rows of a step, write their K and V, and give the logits of some rows.

        token_ids [num_tokens]; kv_layers one per layer; logits_rows [n] indices into token_ids.
        Returns a new array [n, vocab_size].
        """
        ops, config, weights = self._ops, self.config, self._weights
        rope = self._rope.upto(num_positions(batch))
        hidden, heads = self._scratch.take(len(token_ids))
        ops.embedding(weights.embedding, token_ids, hidden)
        rows = DecoderRows(hidden, batch, (rope,), heads)
        hidden = run_decoder(ops, self._layers, kv_layers, rows, logits_rows)
        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.norm_linear(hidden, weights.final_norm, config.rms_norm_eps, weights.head, logits)
        return logits

    def _layer(self, layer: LayerWeights, window: int | None) -> DecoderLayer:
        eps = self.config.rms_norm_eps
        return DecoderLayer(
            attention=AttentionProjection(layer.attention_norm, eps, layer.qkv, layer.q_norm, layer.k_norm),
            output=layer.output,
            mlp_norm=layer.mlp_norm,
            gate_up=layer.gate_up,
            down=layer.down,
            scale=self.config.head_dim**-0.5,
            window=window or 0,
        )


FAMILY = Family(
    architectures=tuple(MODEL_TYPES.values()),
    model_types=MODEL_TYPES,
    gguf_names=GGUF_NAMES,
    from_json=llama_from_json,
    from_gguf=llama_from_gguf,
    parts=llama_parts,
    build=lambda config, packed, ops: LlamaModel(config, llama_weights(packed, config), ops),
    in_blocks=True,
    prepare=LlamaModel.prepare,
    key_scales=LlamaModel.key_scales,
)
