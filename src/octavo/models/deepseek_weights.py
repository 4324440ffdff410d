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
from octavo.models.parts import Matrix, Parts, Rows, Vector, linear

_NAMES = Names(
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
        "mlp": "mlp",
        "router": "mlp.gate",
        "experts": "mlp.experts",
        "shared": "mlp.shared_experts",
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
    assert not is_gguf, "no GGUF names are known for this family"
    hidden = config.hidden_size
    matrices = [Matrix("embedding", (linear(_NAMES("embedding"), config.vocab_size, hidden),), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{_NAMES('final_norm')}.weight", (hidden,))]
    for i in range(config.num_layers):
        matrices += _attention(config, i)
        norms = {"attention_norm": hidden, "mlp_norm": hidden, "latent_norm": config.latent_rank}
        if config.q_rank is not None:
            norms["q_norm"] = config.q_rank
        vectors += [Vector(f"{i}.{word}", f"{_NAMES(word, i)}.weight", (size,)) for word, size in norms.items()]
        if i < config.first_sparse_layer:
            matrices += _mlp(f"{i}.shared", _NAMES("mlp", i), config.intermediate_size, hidden)
            continue
        matrices.append(Matrix(f"{i}.router", (linear(_NAMES("router", i), config.num_experts, hidden),), dtype="f32"))
        if config.is_v3:
            name = f"{_NAMES('router', i)}.e_score_correction_bias"
            vectors.append(Vector(f"{i}.correction", name, (config.num_experts,)))
        for expert in range(config.num_experts):
            matrices += _mlp(f"{i}.{expert}", f"{_NAMES('experts', i)}.{expert}", config.expert_size, hidden)
        if config.num_shared:
            matrices += _mlp(f"{i}.shared", _NAMES("shared", i), config.num_shared * config.expert_size, hidden)
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(_NAMES("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    predictor = f"model.layers.{config.num_layers}."  # of several tokens at once (V3)
    return Parts(
        tuple(matrices),
        tuple(vectors),
        frozenset({f"{_NAMES('head')}.weight"}),
        (".rotary_emb.inv_freq",),
        (predictor,),
    )


def _mlp(key: str, stem: str, inner: int, hidden: int) -> list[Matrix]:
    gate_up = (linear(f"{stem}.gate_proj", inner, hidden), linear(f"{stem}.up_proj", inner, hidden))
    return [Matrix(f"{key}.gate_up", gate_up), Matrix(f"{key}.down", (linear(f"{stem}.down_proj", hidden, inner),))]


def _attention(config: DeepseekConfig, i: int) -> list[Matrix]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.latent_rank
    plain, values, rope = config.plain_dim, config.value_dim, config.rope_dim
    q_size, own = heads * (plain + rope), plain + values  # rows of a head in the matrix that makes K and V
    q = _Turning(heads, plain, rope) if config.is_interleaved else None
    shared_key = _Turning(1, rank, rope) if config.is_interleaved else None
    found = []
    if config.q_rank is None:
        found.append(Matrix(f"{i}.q", (_changed(linear(_NAMES("q", i), q_size, hidden), q),)))
    else:
        found.append(Matrix(f"{i}.q_down", (linear(_NAMES("q_down", i), config.q_rank, hidden),)))
        found.append(Matrix(f"{i}.q", (_changed(linear(_NAMES("q_up", i), q_size, config.q_rank), q),)))
    down = linear(_NAMES("latent_down", i), rank + rope, hidden)
    found.append(Matrix(f"{i}.latent_down", (_changed(down, shared_key),)))
    tensor, shape = f"{_NAMES('latent_up', i)}.weight", (heads * own, rank)
    for head in range(heads):
        k, v = (head * own, head * own + plain), (head * own + plain, (head + 1) * own)
        found.append(Matrix(f"{i}.{head}.into_latent", (Rows(tensor, shape, part=k, change=_turned),)))
        found.append(Matrix(f"{i}.{head}.out_of_latent", (Rows(tensor, shape, part=v),)))
    found.append(Matrix(f"{i}.output", (linear(_NAMES("output", i), hidden, heads * values),)))
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
