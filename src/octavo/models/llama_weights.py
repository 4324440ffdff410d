"""The weights of the Llama family: their tensors in each file format, and what the forward pass is given."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.kernels.ops import F32, Ops, PackedLinear
from octavo.models.balance import balanced_norms
from octavo.models.llama_config import LlamaConfig
from octavo.models.names import Names
from octavo.models.packing import Packed, Progress, WeightSource, pack_parts
from octavo.models.parts import Matrix, Parts, Vector, linear

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
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
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
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: F32  # [hidden_size]
    qkv: PackedLinear  # hidden_size -> q | k | v
    q_norm: F32 | None  # [head_dim]
    k_norm: F32 | None  # [head_dim]
    output: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: F32  # [hidden_size]
    gate_up: PackedLinear  # hidden_size -> gate | up
    down: PackedLinear  # intermediate_size -> hidden_size


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: PackedLinear  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: F32  # [hidden_size]
    head: PackedLinear  # hidden_size -> vocab_size; the embedding itself where they are tied
    rope_divisors: F32 | None  # [head_dim / 2]
    num_bytes: int  # of everything above, a tied head counted once


def llama_parts(config: LlamaConfig, is_gguf: bool) -> Parts:
    """Converters to GGUF interleave the rows of q and k for LlamaForCausalLM, and for no other architecture here."""
    names, hidden, inner = _GGUF if is_gguf else _HUGGING_FACE, config.hidden_size, config.intermediate_size
    q_size, kv_size, bias = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.qkv_bias
    pairs = is_gguf and config.architecture == "LlamaForCausalLM"
    q_heads, kv_heads = (config.num_heads, config.num_kv_heads) if pairs else (0, 0)
    embedding = linear(names("embedding"), config.vocab_size, hidden)
    matrices = [Matrix("embedding", (embedding,), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{names('final_norm')}.weight", (hidden,))]
    for i in range(config.num_layers):
        qkv = (
            linear(names("q", i), q_size, hidden, bias, q_heads),
            linear(names("k", i), kv_size, hidden, bias, kv_heads),
            linear(names("v", i), kv_size, hidden, bias),
        )
        gate_up = tuple(linear(names(word, i), inner, hidden, config.mlp_bias) for word in ("gate", "up"))
        matrices += [
            Matrix(f"{i}.qkv", qkv),
            Matrix(f"{i}.output", (linear(names("output", i), hidden, q_size, config.output_bias),)),
            Matrix(f"{i}.gate_up", gate_up),
            Matrix(f"{i}.down", (linear(names("down", i), hidden, inner, config.mlp_bias),)),
        ]
        norms = {"attention_norm": hidden, "mlp_norm": hidden}
        if config.q_k_norm:
            norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
        vectors += [Vector(f"{i}.{word}", f"{names(word, i)}.weight", (size,)) for word, size in norms.items()]
    head = f"{names('head')}.weight"
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    if is_gguf:
        vectors.append(Vector("rope_divisors", "rope_freqs.weight", (config.head_dim // 2,), is_optional=True))
    # A tied model may store its head once more.
    return Parts(tuple(matrices), tuple(vectors), frozenset({head}), () if is_gguf else (".rotary_emb.inv_freq",))


def load_weights(
    source: WeightSource, config: LlamaConfig, ops: Ops, weights_dtype: str, progress: Progress | None = None
) -> ModelWeights:
    return llama_weights(pack_parts(source, ops, weights_dtype, progress), config)


def llama_weights(packed: Packed, config: LlamaConfig) -> ModelWeights:
    matrices, vectors = packed.matrices, packed.vectors
    norms = [balanced_norms(vectors.get(f"{i}.q_norm"), vectors.get(f"{i}.k_norm")) for i in range(config.num_layers)]
    layers = tuple(
        LayerWeights(
            attention_norm=vectors[f"{i}.attention_norm"],
            qkv=matrices[f"{i}.qkv"],
            q_norm=norms[i][0],
            k_norm=norms[i][1],
            output=matrices[f"{i}.output"],
            mlp_norm=vectors[f"{i}.mlp_norm"],
            gate_up=matrices[f"{i}.gate_up"],
            down=matrices[f"{i}.down"],
        )
        for i in range(config.num_layers)
    )
    embedding = matrices["embedding"]
    return ModelWeights(
        embedding=embedding,
        layers=layers,
        final_norm=vectors["final_norm"],
        head=matrices.get("head", embedding),
        rope_divisors=vectors.get("rope_divisors"),
        num_bytes=packed.num_bytes,
    )
