"""gpt-oss: attention sinks, a window in every other layer, biases, experts with a clamped swiglu. Top to bottom.

Config, tensors, forward pass. It does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops, PackedLinear
from octavo.models.config import RopeConfig, check_experts, check_heads, check_number, check_sizes, check_windows
from octavo.models.config_gguf import Keys, head_dim_of, vocab_size_of
from octavo.models.config_json import Fields, layer_windows, num_kv_heads, read_rope, rope_scaling
from octavo.models.experts import Choice, Expert, add_experts, most_likely
from octavo.models.family import Family
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Rows, Vector, expert_linear, linear
from octavo.models.rope import rope_tables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, weigh
from octavo.models.yarn import yarn_rope

_SWIGLU_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class GptOssConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    expert_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_chosen: int  # experts of one row
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # of each layer; None: all
    swiglu_limit: float = _SWIGLU_LIMIT
    tie_word_embeddings: bool = False
    dtype: str = "f32"

    def __post_init__(self) -> None:
        names = ("vocab_size", "hidden_size", "expert_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes({name: getattr(self, name) for name in (*names, "max_position_embeddings")})
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_experts(self.num_experts, self.num_chosen)
        check_windows(self.windows)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_number("swiglu_limit", self.swiglu_limit)


def gpt_oss_from_json(architecture: str, fields: Fields) -> GptOssConfig:
    fields.refuse_other("swiglu_alpha", 1.702)
    fields.refuse_other("attention_bias", True)
    num_layers, num_heads = fields.integer("num_hidden_layers", 36), fields.integer("num_attention_heads", 64)
    check_sizes({"num_layers": num_layers})
    max_positions = fields.integer("max_position_embeddings", 131072)
    scaling = rope_scaling(fields.data) or {"rope_type": "yarn", "factor": 32.0, "truncate": False} | {
        "original_max_position_embeddings": 4096
    }
    types = ["sliding_attention" if index % 2 == 0 else "full_attention" for index in range(num_layers)]
    return GptOssConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 201088),
        hidden_size=fields.integer("hidden_size", 2880),
        expert_size=fields.integer("intermediate_size", 2880),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, num_heads, 8),
        head_dim=fields.integer("head_dim", 64),
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128)),
        num_chosen=fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4)),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        rope=read_rope(fields, max_positions, scaling, 150000.0),
        max_position_embeddings=max_positions,
        windows=layer_windows(fields, num_layers, fields.optional_integer("sliding_window", 128), types),
        swiglu_limit=fields.number("swiglu_limit", _SWIGLU_LIMIT),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


def gpt_oss_from_gguf(keys: Keys) -> GptOssConfig:
    num_heads, hidden_size, num_layers = (
        keys.integer(name) for name in ("attention.head_count", "embedding_length", "block_count")
    )
    check_sizes({"num_layers": num_layers})
    window, theta = keys.integer("attention.sliding_window"), keys.number("rope.freq_base", 150000.0)
    factor = keys.number("rope.scaling.factor", 32.0)
    original = keys.integer("rope.scaling.original_context_length", 4096)
    return GptOssConfig(
        architecture="GptOssForCausalLM",
        vocab_size=vocab_size_of(keys),
        hidden_size=hidden_size,
        expert_size=keys.integer("expert_feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim_of(keys, hidden_size, num_heads),
        num_experts=keys.integer("expert_count"),
        num_chosen=keys.integer("expert_used_count"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=yarn_rope(theta, factor, original, is_truncated=False),
        max_position_embeddings=keys.integer("context_length"),
        windows=tuple(window if index % 2 == 0 else None for index in range(num_layers)),
        tie_word_embeddings="output.weight" not in keys.shapes,
    )


_HUGGING_FACE = Names(
    "model.layers.{}.",
    {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "sinks": "self_attn.sinks",
        "mlp_norm": "post_attention_layernorm",
        "router": "mlp.router",
        "gate_up": "mlp.experts.gate_up_proj",
        "down": "mlp.experts.down_proj",
    },
)
_GGUF = Names(
    "blk.{}.",
    {
        "embedding": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "output": "attn_output",
        "sinks": "attn_sinks.weight",
        "mlp_norm": "post_attention_norm",
        "router": "ffn_gate_inp",
        "gate": "ffn_gate_exps",
        "up": "ffn_up_exps",
        "down": "ffn_down_exps",
    },
)


def gpt_oss_parts(config: GptOssConfig, is_gguf: bool) -> Parts:
    names, hidden, dim = _GGUF if is_gguf else _HUGGING_FACE, config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    matrices = [Matrix("embedding", (linear(names("embedding"), config.vocab_size, hidden),), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{names('final_norm')}.weight", (hidden,))]
    for i in range(config.num_layers):
        sizes = (("q", q_size), ("k", kv_size), ("v", kv_size))
        router = linear(names("router", i), config.num_experts, hidden, has_bias=True)
        matrices += [
            Matrix(f"{i}.qkv", tuple(linear(names(word, i), size, hidden, has_bias=True) for word, size in sizes)),
            Matrix(f"{i}.output", (linear(names("output", i), hidden, q_size, has_bias=True),)),
            Matrix(f"{i}.router", (router,), dtype="f32"),
        ]
        for expert in range(config.num_experts):
            matrices += _gguf_expert(config, i, expert) if is_gguf else _expert(config, i, expert)
        norms = ("attention_norm", "mlp_norm")
        vectors += [Vector(f"{i}.{word}", f"{names(word, i)}.weight", (hidden,)) for word in norms]
        vectors.append(Vector(f"{i}.sinks", names("sinks", i), (config.num_heads,)))
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    return Parts(tuple(matrices), tuple(vectors), frozenset({f"{names('head')}.weight"}))


def _expert(config: GptOssConfig, layer: int, expert: int) -> list[Matrix]:
    """Of a directory: stacks [num_experts, inputs, outputs], in which gate and up take turns."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    gate_up, down = _HUGGING_FACE("gate_up", layer), _HUGGING_FACE("down", layer)
    first = Rows(
        gate_up,
        (count, hidden, 2 * inner),
        f"{gate_up}_bias",
        (count, 2 * inner),
        part=(expert * hidden, (expert + 1) * hidden),
        bias_part=(2 * expert * inner, 2 * (expert + 1) * inner),
        change=_turned_apart,
        change_bias=_apart,
    )
    second = Rows(
        down,
        (count, inner, hidden),
        f"{down}_bias",
        (count, hidden),
        part=(expert * inner, (expert + 1) * inner),
        bias_part=(expert * hidden, (expert + 1) * hidden),
        change=_turned,
    )
    return [Matrix(f"{layer}.{expert}.gate_up", (first,)), Matrix(f"{layer}.{expert}.down", (second,))]


def _gguf_expert(config: GptOssConfig, layer: int, expert: int) -> list[Matrix]:
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size

    def rows(word: str, num_outputs: int, num_inputs: int) -> Rows:
        stem = _GGUF(word, layer)
        return expert_linear(f"{stem}.weight", (count, num_outputs, num_inputs), expert, f"{stem}.bias")

    gate_up = (rows("gate", inner, hidden), rows("up", inner, hidden))
    return [
        Matrix(f"{layer}.{expert}.gate_up", gate_up),
        Matrix(f"{layer}.{expert}.down", (rows("down", hidden, inner),)),
    ]


def _turned(weight: F32) -> F32:
    return weight.T


def _apart(rows: F32) -> F32:
    return np.concatenate([rows[0::2], rows[1::2]])


def _turned_apart(weight: F32) -> F32:
    return _apart(weight.T)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: F32  # [hidden_size]
    qkv: PackedLinear  # hidden_size -> q | k | v
    sinks: F32  # [num_heads]
    output: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    router: PackedLinear  # hidden_size -> num_experts
    experts: tuple[Expert, ...]


class GptOssModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: GptOssConfig, packed: Packed, ops: Ops) -> None:
        matrices, vectors = packed.matrices, packed.vectors
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding = matrices["embedding"]
        self._head = matrices.get("head", self._embedding)
        self._final_norm = vectors["final_norm"]
        self._layers = tuple(
            _Layer(
                attention_norm=vectors[f"{i}.attention_norm"],
                qkv=matrices[f"{i}.qkv"],
                sinks=vectors[f"{i}.sinks"],
                output=matrices[f"{i}.output"],
                mlp_norm=vectors[f"{i}.mlp_norm"],
                router=matrices[f"{i}.router"],
                experts=tuple(
                    Expert(matrices[f"{i}.{expert}.gate_up"], matrices[f"{i}.{expert}.down"])
                    for expert in range(config.num_experts)
                ),
            )
            for i in range(config.num_layers)
        )
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._scratch = Scratch()

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return build_groups([LayerGeometry(heads, dim, kv_format, window) for window in self.config.windows])

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config, num_tokens = self._ops, self.config, len(token_ids)
        eps, rope = config.rms_norm_eps, self._rope.upto(num_positions(batch))
        hidden = self._scratch.rows("hidden", num_tokens, config.hidden_size)
        normed = self._scratch.rows("normed", num_tokens, config.hidden_size)
        qkv = self._scratch.rows("qkv", num_tokens, self._layers[0].qkv.num_outputs)
        q = self._scratch.heads("q", num_tokens, config.num_heads, config.head_dim)

        ops.embedding(self._embedding, token_ids, hidden)
        for index, (layer, kv, window) in enumerate(zip(self._layers, kv_layers, config.windows, strict=True)):
            ops.rms_norm(hidden, layer.attention_norm, eps, normed)
            ops.linear(normed, layer.qkv, qkv)
            ops.rope_write(qkv, batch, rope, kv, q)
            weigh(ops, q, batch, kv, config.head_dim**-0.5, index)

            if index == config.num_layers - 1 and not are_all_rows(logits_rows, num_tokens):
                # K and V are written for every row; past this point only rows that become logits are needed.
                hidden, q, batch = hidden[logits_rows], q[logits_rows], one_row_each(batch, logits_rows)
                normed = normed[: len(hidden)]
                if not len(hidden):
                    break

            attended = self._scratch.heads("attended", len(hidden), config.num_heads, config.head_dim)
            scale = config.head_dim**-0.5
            ops.paged_attention(q, batch, kv, scale, attended, window=window or 0, sinks=layer.sinks)
            ops.linear(attended.reshape(len(hidden), -1), layer.output, hidden, accumulate=True)

            ops.rms_norm(hidden, layer.mlp_norm, eps, normed)
            choice = self._choose(layer, normed)
            hidden += add_experts(ops, self._scratch, normed, choice, layer.experts, limit=config.swiglu_limit)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.rms_norm(hidden, self._final_norm, eps, normed)
            ops.linear(normed, self._head, logits)
        return logits

    def _choose(self, layer: _Layer, normed: F32) -> Choice:
        """The highest scores, and the softmax of these alone."""
        scores = self._scratch.rows("scores", len(normed), self.config.num_experts)
        self._ops.linear(normed, layer.router, scores)
        indices = most_likely(scores, self.config.num_chosen)
        weights = np.ascontiguousarray(np.take_along_axis(scores, indices, axis=1))
        self._ops.softmax(weights, weights)
        return Choice(indices, weights)


FAMILY = Family(
    architectures=("GptOssForCausalLM",),
    model_types={"gpt_oss": "GptOssForCausalLM"},
    gguf_names={"gpt-oss": "GptOssForCausalLM"},
    from_json=gpt_oss_from_json,
    from_gguf=gpt_oss_from_gguf,
    parts=gpt_oss_parts,
    build=GptOssModel,
    why_uncounted=lambda _: "has attention sinks of its own",
)
