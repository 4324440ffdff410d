"""What tensors a model must have, under the names of each file format, and the check that a file has them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.tensor_file import TensorFile


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names without ".weight" or ".bias"; those of a layer follow `layer`, in which {} is its index."""

    embedding: str
    final_norm: str
    head: str
    layer: str
    attention_norm: str
    q: str
    k: str
    v: str
    output: str
    q_norm: str
    k_norm: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    rope_divisors: str | None = None  # a tensor that scales the rope frequencies, if the format has one
    ignored: tuple[str, ...] = ()  # endings of tensors that say nothing the config does not

    def of_layer(self, index: int, name: str) -> str:
        return self.layer.format(index) + name


HUGGING_FACE = WeightNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    head="lm_head",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    output="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    mlp_norm="post_attention_layernorm",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    ignored=(".rotary_emb.inv_freq",),
)
GGUF = WeightNames(
    embedding="token_embd",
    final_norm="output_norm",
    head="output",
    layer="blk.{}.",
    attention_norm="attn_norm",
    q="attn_q",
    k="attn_k",
    v="attn_v",
    output="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    mlp_norm="ffn_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    rope_divisors="rope_freqs",
)


def expected_shapes(config: ModelConfig, names: WeightNames) -> dict[str, tuple[int, ...]]:
    """tensor -> shape, for every tensor that a model of this config must have."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (config.vocab_size, hidden)}
    linears = {
        names.q: (q_size, hidden, config.qkv_bias),
        names.k: (kv_size, hidden, config.qkv_bias),
        names.v: (kv_size, hidden, config.qkv_bias),
        names.output: (hidden, q_size, config.output_bias),
        names.gate: (inner, hidden, config.mlp_bias),
        names.up: (inner, hidden, config.mlp_bias),
        names.down: (hidden, inner, config.mlp_bias),
    }
    norms = {names.attention_norm: hidden, names.mlp_norm: hidden}
    if config.q_k_norm:
        norms |= {names.q_norm: config.head_dim, names.k_norm: config.head_dim}
    for index in range(config.num_layers):
        for name, size in norms.items():
            shapes[f"{names.of_layer(index, name)}.weight"] = (size,)
        for name, (num_outputs, num_inputs, has_bias) in linears.items():
            shapes[f"{names.of_layer(index, name)}.weight"] = (num_outputs, num_inputs)
            if has_bias:
                shapes[f"{names.of_layer(index, name)}.bias"] = (num_outputs,)
    shapes[f"{names.final_norm}.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[f"{names.head}.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, names: WeightNames, file: TensorFile) -> None:
    """ModelError where the file lacks a tensor, has one of another shape, or one that the config does not call for."""
    expected = expected_shapes(config, names)
    for name, shape in expected.items():
        if name not in file.tensors:
            raise ModelError(f"{file.path} has no tensor {name!r} {list(shape)}; it is incomplete: download it again")
        found = file.tensors[name].shape
        if found != shape:
            raise ModelError(
                f"{file.path}: tensor {name!r} has the shape {list(found)} where the model's config asks for "
                f"{list(shape)}; config and weights do not belong together: download both again"
            )
    optional = {f"{names.head}.weight"}  # a tied model may store its head once more
    if names.rope_divisors is not None:
        divisors = f"{names.rope_divisors}.weight"
        optional.add(divisors)
        if divisors in file.tensors and file.tensors[divisors].shape != (config.head_dim // 2,):
            raise ModelError(
                f"{file.path}: tensor {divisors!r} has the shape {list(file.tensors[divisors].shape)} where heads of "
                f"{config.head_dim} dimensions ask for {[config.head_dim // 2]}"
            )
    for name in file.tensors:
        if name not in expected and name not in optional and not name.endswith(names.ignored):
            raise ModelError(
                f"{file.path}: tensor {name!r} belongs to no part of a {config.architecture} with this config; octavo "
                "would have to leave it out, and answer differently from the model: choose another model"
            )
