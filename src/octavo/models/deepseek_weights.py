"""The weights of DeepSeek-V2 and V3: tensors, taken apart head by head so that attention stays in the latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.kernels.ops import F32, PackedLinear
from octavo.models.deepseek_config import DeepseekConfig
from octavo.models.experts import Expert
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Rows, Vector, expert_linear, linear

_HUGGING_FACE = Names(
    "model.layers.{}.",
    {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "q_down": "self_attn.q_a_proj",
        "q_norm": "self_attn.q_a_layernorm",
        "q_up": "self_attn.q_b_proj",
        "latent_down": "self_attn.kv_a_proj_with_mqa",
        "latent_norm": "self_attn.kv_a_layernorm",
        "latent_up": "self_attn.kv_b_proj",
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "router": "mlp.gate",
        "experts": "mlp.experts",
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
        "q_down": "attn_q_a",
        "q_norm": "attn_q_a_norm",
        "q_up": "attn_q_b",
        "latent_down": "attn_kv_a_mqa",
        "latent_norm": "attn_kv_a_norm",
        "latent_up": "attn_kv_b",
        "latent_k": "attn_k_b",
        "latent_v": "attn_v_b",
        "output": "attn_output",
        "mlp_norm": "ffn_norm",
        "router": "ffn_gate_inp",
    },
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: F32  # [hidden_size]
    q_down: PackedLinear | None  # hidden_size -> q_rank
    q_norm: F32 | None  # [q_rank]
    q: PackedLinear  # q_rank (or hidden_size) -> heads of plain_dim + rope_dim
    latent_down: PackedLinear  # hidden_size -> latent | shared key
    latent_norm: F32  # [latent_rank]
    into_latent: tuple[PackedLinear, ...]  # each head's: plain_dim -> latent_rank
    out_of_latent: tuple[PackedLinear, ...]  # each head's: latent_rank -> value_dim
    output: PackedLinear  # heads of value_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    router: PackedLinear | None  # hidden_size -> num_experts; None: a layer without
    correction: F32 | None  # [num_experts]: added to scores for the choice (V3)
    experts: tuple[Expert, ...]
    shared: Expert | None  # what every row goes through; of a layer without experts its MLP


def deepseek_parts(config: DeepseekConfig, is_gguf: bool) -> Parts:
    names, hidden = _GGUF if is_gguf else _HUGGING_FACE, config.hidden_size
    matrices = [Matrix("embedding", (linear(names("embedding"), config.vocab_size, hidden),), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{names('final_norm')}.weight", (hidden,))]
    for i in range(config.num_layers):
        matrices += [*_attention(config, names, i), *_heads(config, names, i)]
        norms = {"attention_norm": hidden, "mlp_norm": hidden, "latent_norm": config.latent_rank}
        if config.q_rank is not None:
            norms["q_norm"] = config.q_rank
        vectors += [Vector(f"{i}.{word}", f"{names(word, i)}.weight", (size,)) for word, size in norms.items()]
        if i < config.first_sparse_layer:
            stem = f"blk.{i}.ffn_{{}}" if is_gguf else f"model.layers.{i}.mlp.{{}}_proj"
            matrices += _mlp(f"{i}.shared", stem, config.intermediate_size, hidden)
            continue
        matrices += [*_routed(config, names, i, is_gguf), *_shared(config, i, is_gguf)]
        if config.is_v3:
            name = f"blk.{i}.exp_probs_b.bias" if is_gguf else f"{names('router', i)}.e_score_correction_bias"
            vectors.append(Vector(f"{i}.correction", name, (config.num_experts,)))
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    predictor = f"model.layers.{config.num_layers}."  # of several tokens at once (V3)
    return Parts(
        tuple(matrices),
        tuple(vectors),
        frozenset({f"{names('head')}.weight"}),
        (".rotary_emb.inv_freq",),
        (predictor,),
    )


def _mlp(key: str, stem: str, inner: int, hidden: int) -> list[Matrix]:
    """stem has {} where gate, up or down stands."""
    gate_up = (linear(stem.format("gate"), inner, hidden), linear(stem.format("up"), inner, hidden))
    return [Matrix(f"{key}.gate_up", gate_up), Matrix(f"{key}.down", (linear(stem.format("down"), hidden, inner),))]


def _routed(config: DeepseekConfig, names: Names, i: int, is_gguf: bool) -> list[Matrix]:
    count, inner, hidden = config.num_experts, config.expert_size, config.hidden_size
    found = [Matrix(f"{i}.router", (linear(names("router", i), count, hidden),), dtype="f32")]
    for expert in range(count):
        if not is_gguf:
            stem = f"{names('experts', i)}.{expert}.{{}}_proj"
            found += _mlp(f"{i}.{expert}", stem, inner, hidden)
            continue
        shape, turned = (count, inner, hidden), (count, hidden, inner)
        gate_up = tuple(expert_linear(f"blk.{i}.ffn_{word}_exps.weight", shape, expert) for word in ("gate", "up"))
        down = expert_linear(f"blk.{i}.ffn_down_exps.weight", turned, expert)
        found += [Matrix(f"{i}.{expert}.gate_up", gate_up), Matrix(f"{i}.{expert}.down", (down,))]
    return found


def _shared(config: DeepseekConfig, i: int, is_gguf: bool) -> list[Matrix]:
    if not config.num_shared:
        return []
    stem = f"blk.{i}.ffn_{{}}_shexp" if is_gguf else f"model.layers.{i}.mlp.shared_experts.{{}}_proj"
    return _mlp(f"{i}.shared", stem, config.num_shared * config.expert_size, config.hidden_size)


def _attention(config: DeepseekConfig, names: Names, i: int) -> list[Matrix]:
    hidden, rank, rope = config.hidden_size, config.latent_rank, config.rope_dim
    q_size = config.num_heads * (config.plain_dim + rope)
    q = _Turning(config.num_heads, config.plain_dim, rope) if config.is_interleaved else None
    shared_key = _Turning(1, rank, rope) if config.is_interleaved else None
    found = []
    if config.q_rank is None:
        found.append(Matrix(f"{i}.q", (_changed(linear(names("q", i), q_size, hidden), q),)))
    else:
        found.append(Matrix(f"{i}.q_down", (linear(names("q_down", i), config.q_rank, hidden),)))
        found.append(Matrix(f"{i}.q", (_changed(linear(names("q_up", i), q_size, config.q_rank), q),)))
    down = linear(names("latent_down", i), rank + rope, hidden)
    found.append(Matrix(f"{i}.latent_down", (_changed(down, shared_key),)))
    found.append(Matrix(f"{i}.output", (linear(names("output", i), hidden, config.num_heads * config.value_dim),)))
    return found


def _heads(config: DeepseekConfig, names: Names, i: int) -> list[Matrix]:
    """Head by head, the way into the latent (which is K's matrix, turned) and the way out of it (V's)."""
    heads, rank, plain, values = config.num_heads, config.latent_rank, config.plain_dim, config.value_dim
    own = plain + values  # rows of a head where the matrices of K and V are one
    found = []
    for head in range(heads):
        if config.is_split:
            into = expert_linear(f"{names('latent_k', i)}.weight", (heads, rank, plain), head)
            out = expert_linear(f"{names('latent_v', i)}.weight", (heads, values, rank), head)
        else:
            tensor, shape, start = f"{names('latent_up', i)}.weight", (heads * own, rank), head * own
            into = Rows(tensor, shape, part=(start, start + plain), change=_turned)
            out = Rows(tensor, shape, part=(start + plain, start + own))
        found += [Matrix(f"{i}.{head}.into_latent", (into,)), Matrix(f"{i}.{head}.out_of_latent", (out,))]
    return found


def _turned(weight: F32) -> F32:
    return weight.T


def _changed(rows: Rows, change: Callable[[F32], F32] | None) -> Rows:
    return Rows(rows.tensor, rows.shape, change=change)


@dataclass(frozen=True, slots=True)
class _Turning:
    """Of each head, behind `plain` rows, rows 2j and 2j + 1 become rows j and j + rope / 2. Called with the weight."""

    heads: int
    plain: int
    rope: int

    def __call__(self, weight: F32) -> F32:
        heads = weight.reshape(self.heads, self.plain + self.rope, -1).copy()
        turning = heads[:, self.plain :]
        heads[:, self.plain :] = np.concatenate([turning[:, 0::2], turning[:, 1::2]], axis=1)
        return heads.reshape(weight.shape)


def layer_weights(config: DeepseekConfig, packed: Packed, i: int) -> LayerWeights:
    matrices, vectors = packed.matrices, packed.vectors
    is_sparse = f"{i}.router" in matrices

    def expert(key: str) -> Expert:
        return Expert(matrices[f"{key}.gate_up"], matrices[f"{key}.down"])

    return LayerWeights(
        attention_norm=vectors[f"{i}.attention_norm"],
        q_down=matrices.get(f"{i}.q_down"),
        q_norm=vectors.get(f"{i}.q_norm"),
        q=matrices[f"{i}.q"],
        latent_down=matrices[f"{i}.latent_down"],
        latent_norm=vectors[f"{i}.latent_norm"],
        into_latent=tuple(matrices[f"{i}.{head}.into_latent"] for head in range(config.num_heads)),
        out_of_latent=tuple(matrices[f"{i}.{head}.out_of_latent"] for head in range(config.num_heads)),
        output=matrices[f"{i}.output"],
        mlp_norm=vectors[f"{i}.mlp_norm"],
        router=matrices.get(f"{i}.router"),
        correction=vectors.get(f"{i}.correction"),
        experts=tuple(expert(f"{i}.{number}") for number in range(config.num_experts)) if is_sparse else (),
        shared=expert(f"{i}.shared") if f"{i}.shared.down" in matrices else None,
    )
