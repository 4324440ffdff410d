"""Falcon: attention and MLP side by side on one norm (7B) or on two (40B), rope, few KV heads. Read it top to bottom.

Config, tensors, forward pass. It does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops, PackedLinear
from octavo.models.config import RopeConfig, check_heads, check_number, check_sizes
from octavo.models.config_gguf import Keys, rope_of, vocab_size_of
from octavo.models.config_json import Fields, equal_share, read_rope, rope_scaling
from octavo.models.family import Family
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Rows, Vector, linear
from octavo.models.rope import rope_tables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, weigh


@dataclass(frozen=True, slots=True)
class FalconConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    layer_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    has_two_norms: bool = False  # one before attention, one before the MLP
    groups_of_heads: bool = False  # files store, per KV head, its query heads, then K, then V
    has_bias: bool = False
    tie_word_embeddings: bool = True
    dtype: str = "f32"

    def __post_init__(self) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes({name: getattr(self, name) for name in (*names, "max_position_embeddings")})
        equal_share(self.hidden_size, self.num_heads)
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_number("layer_norm_epsilon", self.layer_norm_eps)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def falcon_from_json(architecture: str, fields: Fields) -> FalconConfig:
    is_new = fields.flag("new_decoder_architecture")
    fields.refuse_other("alibi", False)
    fields.refuse_other("activation", "gelu")
    if not is_new:
        fields.refuse_other("parallel_attn", True)
        fields.refuse_other("multi_query", True)
    hidden_size, num_heads = fields.integer("hidden_size", 4544), fields.integer("num_attention_heads", 71)
    max_positions = fields.integer("max_position_embeddings", 2048)
    return FalconConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 65024),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden_size),
        num_layers=fields.integer("num_hidden_layers", 32),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_kv_heads", num_heads) if is_new else 1,
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        rope=read_rope(fields, max_positions, rope_scaling(fields.data)),
        max_position_embeddings=max_positions,
        has_two_norms=is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2,
        groups_of_heads=is_new,
        has_bias=fields.flag("bias"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def falcon_from_gguf(keys: Keys) -> FalconConfig:
    return FalconConfig(
        architecture="FalconForCausalLM",
        vocab_size=vocab_size_of(keys),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length", 4 * keys.integer("embedding_length")),
        num_layers=keys.integer("block_count"),
        num_heads=keys.integer("attention.head_count"),
        num_kv_heads=keys.integer("attention.head_count_kv", 1),
        layer_norm_eps=keys.number("attention.layer_norm_epsilon"),
        rope=rope_of(keys),
        max_position_embeddings=keys.integer("context_length"),
        has_two_norms="blk.0.attn_norm_2.weight" in keys.shapes,
        has_bias="blk.0.attn_qkv.bias" in keys.shapes,
        tie_word_embeddings="output.weight" not in keys.shapes,
    )


_HUGGING_FACE = Names(
    "transformer.h.{}.",
    {
        "embedding": "transformer.word_embeddings",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "norm": "input_layernorm",
        "attention_norm": "ln_attn",
        "mlp_norm": "ln_mlp",
        "qkv": "self_attention.query_key_value",
        "output": "self_attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
)
_GGUF = Names(
    "blk.{}.",
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "norm": "attn_norm",
        "attention_norm": "attn_norm_2",
        "mlp_norm": "attn_norm",
        "qkv": "attn_qkv",
        "output": "attn_output",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)


def falcon_parts(config: FalconConfig, is_gguf: bool) -> Parts:
    """Converters to GGUF have put q, k and v one below the other; in directories the new decoder mixes them."""
    names, hidden, inner = _GGUF if is_gguf else _HUGGING_FACE, config.hidden_size, config.intermediate_size
    kv_heads, dim, bias = config.num_kv_heads, config.head_dim, config.has_bias

    def separate(values: F32) -> F32:
        parts = values.reshape(kv_heads, config.num_heads // kv_heads + 2, dim, *values.shape[1:])
        flat = [part.reshape(-1, *values.shape[1:]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])]
        return np.concatenate(flat)

    change = separate if config.groups_of_heads and not is_gguf else None
    embedding = linear(names("embedding"), config.vocab_size, hidden)
    matrices = [Matrix("embedding", (embedding,), is_of_vocabulary=True)]
    norms = [("final_norm", names("final_norm"))]
    for i in range(config.num_layers):
        qkv = linear(names("qkv", i), hidden + 2 * kv_heads * dim, hidden, bias)
        qkv = Rows(qkv.tensor, qkv.shape, qkv.bias, qkv.bias_shape, change=change, change_bias=change)
        matrices += [
            Matrix(f"{i}.qkv", (qkv,)),
            Matrix(f"{i}.output", (linear(names("output", i), hidden, hidden, bias),)),
            Matrix(f"{i}.up", (linear(names("up", i), inner, hidden, bias),)),
            Matrix(f"{i}.down", (linear(names("down", i), hidden, inner, bias),)),
        ]
        words = ("attention_norm", "mlp_norm") if config.has_two_norms else ("norm",)
        norms += [(f"{i}.{word}", names(word, i)) for word in words]
    vectors = [Vector(f"{key}.{end}", f"{stem}.{end}", (hidden,)) for key, stem in norms for end in ("weight", "bias")]
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    return Parts(tuple(matrices), tuple(vectors), frozenset({f"{names('head')}.weight"}), (".rotary_emb.inv_freq",))


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: F32  # [hidden_size]
    bias: F32  # [hidden_size]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    mlp_norm: _Norm | None  # None: what attention reads
    qkv: PackedLinear  # hidden_size -> q | k | v
    output: PackedLinear  # hidden_size -> hidden_size
    up: PackedLinear  # hidden_size -> intermediate_size
    down: PackedLinear  # intermediate_size -> hidden_size


class FalconModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: FalconConfig, packed: Packed, ops: Ops) -> None:
        def norm(key: str) -> _Norm:
            return _Norm(packed.vectors[f"{key}.weight"], packed.vectors[f"{key}.bias"])

        matrices, two = packed.matrices, config.has_two_norms
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding = matrices["embedding"]
        self._head = matrices.get("head", self._embedding)
        self._final_norm = norm("final_norm")
        self._layers = tuple(
            _Layer(
                attention_norm=norm(f"{i}.attention_norm" if two else f"{i}.norm"),
                mlp_norm=norm(f"{i}.mlp_norm") if two else None,
                qkv=matrices[f"{i}.qkv"],
                output=matrices[f"{i}.output"],
                up=matrices[f"{i}.up"],
                down=matrices[f"{i}.down"],
            )
            for i in range(config.num_layers)
        )
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._scratch = Scratch()

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        config = self.config
        return build_groups([LayerGeometry(config.num_kv_heads, config.head_dim, kv_format)] * config.num_layers)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config, num_tokens = self._ops, self.config, len(token_ids)
        rope = self._rope.upto(num_positions(batch))
        hidden = self._scratch.rows("hidden", num_tokens, config.hidden_size)
        normed = self._scratch.rows("normed", num_tokens, config.hidden_size)
        qkv = self._scratch.rows("qkv", num_tokens, self._layers[0].qkv.num_outputs)
        q = self._scratch.heads("q", num_tokens, config.num_heads, config.head_dim)

        ops.embedding(self._embedding, token_ids, hidden)
        for index, (layer, kv) in enumerate(zip(self._layers, kv_layers, strict=True)):
            self._norm(hidden, layer.attention_norm, normed)
            ops.linear(normed, layer.qkv, qkv)
            ops.rope_write(qkv, batch, rope, kv, q)
            weigh(ops, q, batch, kv, config.head_dim**-0.5, index)

            if index == config.num_layers - 1 and not are_all_rows(logits_rows, num_tokens):
                # K and V are written for every row; past this point only rows that become logits are needed.
                hidden, q, batch = hidden[logits_rows], q[logits_rows], one_row_each(batch, logits_rows)
                normed = normed[logits_rows]
                if not len(hidden):
                    break

            inner = self._scratch.rows("inner", len(hidden), config.intermediate_size)
            if layer.mlp_norm is not None:
                self._norm(hidden, layer.mlp_norm, normed)
            ops.linear(normed, layer.up, inner)
            ops.activation(inner, "gelu", inner)

            attended = self._scratch.heads("attended", len(hidden), config.num_heads, config.head_dim)
            ops.paged_attention(q, batch, kv, config.head_dim**-0.5, attended)
            ops.linear(attended.reshape(len(hidden), -1), layer.output, hidden, accumulate=True)
            ops.linear(inner, layer.down, hidden, accumulate=True)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            self._norm(hidden, self._final_norm, normed)
            ops.linear(normed, self._head, logits)
        return logits

    def _norm(self, x: F32, norm: _Norm, out: F32) -> None:
        self._ops.layer_norm(x, norm.weight, norm.bias, self.config.layer_norm_eps, out)


FAMILY = Family(
    architectures=("FalconForCausalLM",),
    model_types={"falcon": "FalconForCausalLM"},
    gguf_names={"falcon": "FalconForCausalLM"},
    from_json=falcon_from_json,
    from_gguf=falcon_from_gguf,
    parts=falcon_parts,
    build=FalconModel,
)
