"""Mixtral and Qwen3-MoE: Llama's attention, and experts in place of the MLP. Read it top to bottom.

Config, tensors, forward pass. It does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ModelError
from octavo.kernels.ops import F32, I32, AttentionBatch, AttentionProjection, KVLayer, Ops, PackedLinear
from octavo.models.balance import balanced_norms, key_scales, positions
from octavo.models.config import RopeConfig, check_experts, check_heads, check_number, check_sizes, check_windows
from octavo.models.config_gguf import Keys, head_dim_of, rope_of, vocab_size_of
from octavo.models.config_json import Fields, equal_share, num_kv_heads, read_rope, rope_scaling
from octavo.models.experts import Expert, add_experts, choose_by_softmax
from octavo.models.family import Family
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Rows, Vector, expert_linear, linear
from octavo.models.rope import rope_tables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, weigh


@dataclass(frozen=True, slots=True)
class MixtralConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    expert_size: int  # the inner size of one expert
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    num_chosen: int  # experts of one row
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    normalises: bool  # the weights of the chosen experts add up to 1
    dense_layers: tuple[int, ...] = ()  # those without experts
    window: int | None = None  # tokens that every layer sees
    tie_word_embeddings: bool = False
    dtype: str = "f32"

    def __post_init__(self) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes({name: getattr(self, name) for name in (*names, "max_position_embeddings", "expert_size")})
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_experts(self.num_experts, self.num_chosen)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_windows((self.window,))

    @property
    def is_qwen(self) -> bool:
        """With RMS norm of each head of q and k, and other names."""
        return self.architecture == "Qwen3MoeForCausalLM"


def mixtral_from_json(architecture: str, fields: Fields) -> MixtralConfig:
    fields.refuse_other("hidden_act", "silu")
    is_qwen = architecture == "Qwen3MoeForCausalLM"
    if fields.flag("attention_bias") or fields.flag("use_sliding_window"):
        raise ModelError("config.json: a Qwen3MoE with attention_bias or use_sliding_window is not supported")
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers, inner = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    max_positions = fields.integer("max_position_embeddings", 32768 if is_qwen else 131072)
    step = fields.integer("decoder_sparse_step", 1)
    check_sizes({"num_layers": num_layers, "decoder_sparse_step": step})
    dense = set(fields.data.get("mlp_only_layers") or ()) | {i for i in range(num_layers) if (i + 1) % step}
    return MixtralConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=inner,
        expert_size=fields.integer("moe_intermediate_size", 768) if is_qwen else inner,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, num_heads, 4 if is_qwen else 8),
        head_dim=fields.integer("head_dim", equal_share(hidden_size, num_heads)),
        num_experts=fields.integer("num_local_experts", fields.integer("num_experts", 128 if is_qwen else 8)),
        num_chosen=fields.integer("num_experts_per_tok", 8 if is_qwen else 2),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6 if is_qwen else 1e-5),
        rope=read_rope(fields, max_positions, rope_scaling(fields.data), 10000.0 if is_qwen else 1e6),
        max_position_embeddings=max_positions,
        normalises=fields.flag("norm_topk_prob") if is_qwen else True,
        dense_layers=tuple(sorted(dense)) if is_qwen else (),
        window=None if is_qwen else fields.optional_integer("sliding_window", None),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


def mixtral_from_gguf(keys: Keys) -> MixtralConfig:
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    is_qwen = keys.architecture == "qwen3moe"
    inner = keys.integer("feed_forward_length", keys.integer("expert_feed_forward_length", 0) or None)
    return MixtralConfig(
        architecture="Qwen3MoeForCausalLM" if is_qwen else "MixtralForCausalLM",
        vocab_size=vocab_size_of(keys),
        hidden_size=hidden_size,
        intermediate_size=inner,
        expert_size=keys.integer("expert_feed_forward_length") if is_qwen else inner,
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim_of(keys, hidden_size, num_heads),
        num_experts=keys.integer("expert_count"),
        num_chosen=keys.integer("expert_used_count"),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope_of(keys),
        max_position_embeddings=keys.integer("context_length"),
        normalises=True,
        window=keys.integer("attention.sliding_window", 0) or None,
        tie_word_embeddings="output.weight" not in keys.shapes,
    )


_ATTENTION = {
    "embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}
_MIXTRAL_EXPERTS = {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"}
_MIXTRAL = Names("model.layers.{}.", {**_ATTENTION, **_MIXTRAL_EXPERTS, "gate": "w1", "up": "w3", "down": "w2"})
_QWEN_EXPERTS = {"router": "mlp.gate", "experts": "mlp.experts", "dense": "mlp"}
_QWEN = Names(
    "model.layers.{}.",
    {**_ATTENTION, **_QWEN_EXPERTS, "gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
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
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
        "router": "ffn_gate_inp",
        "gate": "ffn_gate_exps",
        "up": "ffn_up_exps",
        "down": "ffn_down_exps",
    },
)


def mixtral_parts(config: MixtralConfig, is_gguf: bool) -> Parts:
    """Converters to GGUF interleave the rows of q and k of Mixtral."""
    names = _GGUF if is_gguf else _QWEN if config.is_qwen else _MIXTRAL
    hidden, dim = config.hidden_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    pairs = is_gguf and not config.is_qwen
    q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if pairs else (0, 0)
    matrices = [Matrix("embedding", (linear(names("embedding"), config.vocab_size, hidden),), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{names('final_norm')}.weight", (hidden,))]
    for i in range(config.num_layers):
        qkv = (
            linear(names("q", i), q_size, hidden, interleaved_heads=q_heads),
            linear(names("k", i), kv_size, hidden, interleaved_heads=kv_heads),
            linear(names("v", i), kv_size, hidden),
        )
        matrices += [Matrix(f"{i}.qkv", qkv), Matrix(f"{i}.output", (linear(names("output", i), hidden, q_size),))]
        matrices += _dense(config, i) if i in config.dense_layers else _experts(config, names, i, is_gguf)
        norms = {"attention_norm": hidden, "mlp_norm": hidden}
        if config.is_qwen:
            norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
        vectors += [Vector(f"{i}.{word}", f"{names(word, i)}.weight", (size,)) for word, size in norms.items()]
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    return Parts(tuple(matrices), tuple(vectors), frozenset({f"{names('head')}.weight"}))


def _dense(config: MixtralConfig, layer: int) -> list[Matrix]:
    stem, hidden, inner = f"model.layers.{layer}.mlp.", config.hidden_size, config.intermediate_size
    gate_up = (linear(stem + "gate_proj", inner, hidden), linear(stem + "up_proj", inner, hidden))
    return [
        Matrix(f"{layer}.gate_up", gate_up),
        Matrix(f"{layer}.down", (linear(stem + "down_proj", hidden, inner),)),
    ]


def _experts(config: MixtralConfig, names: Names, layer: int, is_gguf: bool) -> list[Matrix]:
    hidden, inner, count = config.hidden_size, config.expert_size, config.num_experts

    def rows(word: str, expert: int, num_outputs: int, num_inputs: int) -> Rows:
        if is_gguf:
            return expert_linear(f"{names(word, layer)}.weight", (count, num_outputs, num_inputs), expert)
        return linear(f"{names('experts', layer)}.{expert}.{names(word)}", num_outputs, num_inputs)

    found = [Matrix(f"{layer}.router", (linear(names("router", layer), count, hidden),), dtype="f32")]
    for expert in range(count):
        gate_up = (rows("gate", expert, inner, hidden), rows("up", expert, inner, hidden))
        found.append(Matrix(f"{layer}.{expert}.gate_up", gate_up))
        found.append(Matrix(f"{layer}.{expert}.down", (rows("down", expert, hidden, inner),)))
    return found


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: F32  # [hidden_size]
    qkv: PackedLinear  # hidden_size -> q | k | v
    q_norm: F32 | None  # [head_dim]
    k_norm: F32 | None  # [head_dim]
    output: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    router: PackedLinear | None  # hidden_size -> num_experts; None: a layer without experts
    experts: tuple[Expert, ...]  # one where there is no router


class MixtralModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: MixtralConfig, packed: Packed, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding = packed.matrices["embedding"]
        self._head = packed.matrices.get("head", self._embedding)
        self._final_norm = packed.vectors["final_norm"]
        self._layers = tuple(_layer(config, packed, index) for index in range(config.num_layers))
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._scratch = Scratch()

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        config = self.config
        layer = LayerGeometry(config.num_kv_heads, config.head_dim, kv_format, config.window)
        return build_groups([layer] * config.num_layers)

    def key_scales(self) -> tuple[F32, ...]:
        """As `Family.key_scales`."""
        config, rope = self.config, self._rope.upto(positions(self.config.max_position_embeddings))
        eps, heads, dim = config.rms_norm_eps, config.num_kv_heads, config.head_dim
        inputs = (AttentionProjection(one.attention_norm, eps, one.qkv, one.q_norm, one.k_norm) for one in self._layers)
        return tuple(key_scales(self._ops, one, heads, dim, rope) for one in inputs if one.k_norm is not None)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config, num_tokens = self._ops, self.config, len(token_ids)
        eps, rope, window = config.rms_norm_eps, self._rope.upto(num_positions(batch)), config.window or 0
        hidden = self._scratch.rows("hidden", num_tokens, config.hidden_size)
        normed = self._scratch.rows("normed", num_tokens, config.hidden_size)
        qkv = self._scratch.rows("qkv", num_tokens, self._layers[0].qkv.num_outputs)
        q = self._scratch.heads("q", num_tokens, config.num_heads, config.head_dim)

        ops.embedding(self._embedding, token_ids, hidden)
        for index, (layer, kv) in enumerate(zip(self._layers, kv_layers, strict=True)):
            ops.rms_norm(hidden, layer.attention_norm, eps, normed)
            ops.linear(normed, layer.qkv, qkv)
            ops.rope_write(qkv, batch, rope, kv, q, q_norm=layer.q_norm, k_norm=layer.k_norm, norm_eps=eps)
            weigh(ops, q, batch, kv, config.head_dim**-0.5, index)

            if index == config.num_layers - 1 and not are_all_rows(logits_rows, num_tokens):
                # K and V are written for every row; past this point only rows that become logits are needed.
                hidden, q, batch = hidden[logits_rows], q[logits_rows], one_row_each(batch, logits_rows)
                normed = normed[: len(hidden)]
                if not len(hidden):
                    break

            attended = self._scratch.heads("attended", len(hidden), config.num_heads, config.head_dim)
            ops.paged_attention(q, batch, kv, config.head_dim**-0.5, attended, window=window)
            ops.linear(attended.reshape(len(hidden), -1), layer.output, hidden, accumulate=True)

            ops.rms_norm(hidden, layer.mlp_norm, eps, normed)
            self._mlp(layer, normed, hidden)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.rms_norm(hidden, self._final_norm, eps, normed)
            ops.linear(normed, self._head, logits)
        return logits

    def _mlp(self, layer: _Layer, normed: F32, hidden: F32) -> None:
        """hidden += what the experts make of normed"""
        ops, config, scratch = self._ops, self.config, self._scratch
        if layer.router is None:
            (dense,) = layer.experts
            gate_up = scratch.rows("gate_up", len(normed), 2 * config.intermediate_size)
            inner = scratch.rows("inner", len(normed), config.intermediate_size)
            ops.linear(normed, dense.gate_up, gate_up)
            ops.silu_mul(gate_up, inner)
            ops.linear(inner, dense.down, hidden, accumulate=True)
            return
        scores = scratch.rows("scores", len(normed), config.num_experts)
        ops.linear(normed, layer.router, scores)
        choice = choose_by_softmax(ops, scores, config.num_chosen, normalises=config.normalises)
        hidden += add_experts(ops, scratch, normed, choice, layer.experts)


def _layer(config: MixtralConfig, packed: Packed, i: int) -> _Layer:
    matrices, vectors = packed.matrices, packed.vectors
    q_norm, k_norm = balanced_norms(vectors.get(f"{i}.q_norm"), vectors.get(f"{i}.k_norm"))
    stems = [f"{i}"] if i in config.dense_layers else [f"{i}.{expert}" for expert in range(config.num_experts)]
    return _Layer(
        attention_norm=vectors[f"{i}.attention_norm"],
        qkv=matrices[f"{i}.qkv"],
        q_norm=q_norm,
        k_norm=k_norm,
        output=matrices[f"{i}.output"],
        mlp_norm=vectors[f"{i}.mlp_norm"],
        router=matrices.get(f"{i}.router"),
        experts=tuple(Expert(matrices[f"{stem}.gate_up"], matrices[f"{stem}.down"]) for stem in stems),
    )


FAMILY = Family(
    architectures=("MixtralForCausalLM", "Qwen3MoeForCausalLM"),
    model_types={"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"},
    gguf_names={"llama of experts": "MixtralForCausalLM", "qwen3moe": "Qwen3MoeForCausalLM"},
    from_json=mixtral_from_json,
    from_gguf=mixtral_from_gguf,
    parts=mixtral_parts,
    build=MixtralModel,
    key_scales=MixtralModel.key_scales,
)
