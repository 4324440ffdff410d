"""DeepSeek-V2, V2-Lite and V3: latent attention in absorbed form, routed and shared experts. Read it top to bottom.

Of a token the cache holds one latent, from which K and V of every head follow, and one rotated key that all share.
Queries are brought into the latent's space, and what is attended is brought out of it: K and V themselves are never
made (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2). It does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops
from octavo.models.deepseek_config import GGUF_NAME, MODEL_TYPES, DeepseekConfig, deepseek_from_gguf, deepseek_from_json
from octavo.models.deepseek_weights import LayerWeights, deepseek_parts, layer_weights
from octavo.models.experts import Choice, add_experts, choose_in_groups, normalised
from octavo.models.family import Family
from octavo.models.packing import Packed
from octavo.models.rope import rope_tables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, positions

_LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others
_LEAST_SUM = 1e-20


class DeepseekModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: DeepseekConfig, packed: Packed, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding = packed.matrices["embedding"]
        self._head = packed.matrices.get("head", self._embedding)
        self._final_norm = packed.vectors["final_norm"]
        self._layers = tuple(layer_weights(config, packed, index) for index in range(config.num_layers))
        self._rope = rope_tables(config.rope, config.rope_dim, config.max_position_embeddings)
        self._scratch = Scratch()

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        layer = LayerGeometry(1, self.config.latent_dim, kv_format, kind="latent")
        return build_groups([layer] * self.config.num_layers)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config, num_tokens = self._ops, self.config, len(token_ids)
        rope, at, eps = self._rope.upto(num_positions(batch)), positions(batch), config.rms_norm_eps
        hidden = self._scratch.rows("hidden", num_tokens, config.hidden_size)
        normed = self._scratch.rows("normed", num_tokens, config.hidden_size)

        ops.embedding(self._embedding, token_ids, hidden)
        for index, (layer, kv) in enumerate(zip(self._layers, kv_layers, strict=True)):
            ops.rms_norm(hidden, layer.attention_norm, eps, normed)
            latent = self._latent(layer, normed)
            ops.rotate(latent[:, np.newaxis], at, rope, config.latent_rank)
            ops.latent_write(latent, batch, kv)

            if index == config.num_layers - 1 and not are_all_rows(logits_rows, num_tokens):
                # Latents are written for every row; past this point only rows that become logits are needed.
                hidden, normed, at = hidden[logits_rows], normed[logits_rows], at[logits_rows]
                batch = one_row_each(batch, logits_rows)
                if not len(hidden):
                    break

            q = self._queries(layer, normed)
            ops.rotate(q, at, rope, config.plain_dim)
            self._attend(layer, q, batch, kv, hidden)

            ops.rms_norm(hidden, layer.mlp_norm, eps, normed)
            self._mlp(layer, normed, hidden)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.rms_norm(hidden, self._final_norm, eps, normed)
            ops.linear(normed, self._head, logits)
        return logits

    def _latent(self, layer: LayerWeights, normed: F32) -> F32:
        """[num_rows, rank + rope_dim]: the normed latent, and the shared key before its rotation."""
        ops, config, rank = self._ops, self.config, self.config.latent_rank
        both = self._scratch.rows("latent", len(normed), config.latent_dim)
        ops.linear(normed, layer.latent_down, both)
        latent = np.ascontiguousarray(both[:, :rank])
        ops.rms_norm(latent, layer.latent_norm, _LATENT_EPS, latent)
        both[:, :rank] = latent
        return both

    def _queries(self, layer: LayerWeights, normed: F32) -> F32:
        """[num_rows, num_heads, plain_dim + rope_dim], before the rotation"""
        ops, config = self._ops, self.config
        q = self._scratch.heads("q", len(normed), config.num_heads, config.plain_dim + config.rope_dim)
        flat = q.reshape(len(normed), -1)
        if layer.q_down is None or layer.q_norm is None:
            ops.linear(normed, layer.q, flat)
            return q
        low = self._scratch.rows("q_low", len(normed), layer.q_down.num_outputs)
        ops.linear(normed, layer.q_down, low)
        ops.rms_norm(low, layer.q_norm, _LATENT_EPS, low)
        ops.linear(low, layer.q, flat)
        return q

    def _attend(self, layer: LayerWeights, q: F32, batch: AttentionBatch, kv: KVLayer, hidden: F32) -> None:
        """hidden += attention. Head by head into the latent's space, and out of it."""
        ops, config, count, rank = self._ops, self.config, len(hidden), self.config.latent_rank
        absorbed = self._scratch.heads("absorbed", count, config.num_heads, config.latent_dim)
        inside = self._scratch.rows("inside", count, rank)
        for head, weight in enumerate(layer.into_latent):
            ops.linear(np.ascontiguousarray(q[:, head, : config.plain_dim]), weight, inside)
            absorbed[:, head, :rank] = inside
        absorbed[:, :, rank:] = q[:, :, config.plain_dim :]

        attended = self._scratch.heads("attended", count, config.num_heads, rank)
        ops.latent_attention(absorbed, batch, kv, rank, config.scale, attended)

        values = self._scratch.heads("values", count, config.num_heads, config.value_dim)
        outside = self._scratch.rows("outside", count, config.value_dim)
        for head, weight in enumerate(layer.out_of_latent):
            ops.linear(np.ascontiguousarray(attended[:, head]), weight, outside)
            values[:, head] = outside
        ops.linear(values.reshape(count, -1), layer.output, hidden, accumulate=True)

    def _mlp(self, layer: LayerWeights, normed: F32, hidden: F32) -> None:
        """hidden += experts of the row's choice + the one that all rows have"""
        ops, scratch = self._ops, self._scratch
        if layer.router is not None:
            scores = scratch.rows("scores", len(normed), layer.router.num_outputs)
            ops.linear(normed, layer.router, scores)
            hidden += add_experts(ops, scratch, normed, self._choose(layer, scores), layer.experts)
        if layer.shared is not None:
            size = layer.shared.down.num_inputs  # of layers without experts another one than of shared experts
            gate_up = scratch.rows(f"gate_up_{size}", len(normed), 2 * size)
            inner = scratch.rows(f"inner_{size}", len(normed), size)
            ops.linear(normed, layer.shared.gate_up, gate_up)
            ops.silu_mul(gate_up, inner)
            ops.linear(inner, layer.shared.down, hidden, accumulate=True)

    def _choose(self, layer: LayerWeights, scores: F32) -> Choice:
        """V2: softmax. V3: sigmoid, chosen after a correction that is not in the weights."""
        config, likely = self.config, np.empty_like(scores)
        if config.is_v3:
            self._ops.activation(scores, "sigmoid", likely)
        else:
            self._ops.softmax(scores, likely)
        corrected = likely if layer.correction is None else likely + layer.correction
        indices = choose_in_groups(corrected, config.choice, by_best_two=config.is_v3)
        weights = np.take_along_axis(likely, indices, axis=1)
        if config.normalises:
            weights = normalised(weights, _LEAST_SUM)
        return Choice(indices, weights * np.float32(config.routed_scale))


FAMILY = Family(
    architectures=tuple(MODEL_TYPES.values()),
    model_types=MODEL_TYPES,
    gguf_names={GGUF_NAME: "DeepseekV2ForCausalLM"},
    from_json=deepseek_from_json,
    from_gguf=deepseek_from_gguf,
    parts=deepseek_parts,
    build=DeepseekModel,
)
