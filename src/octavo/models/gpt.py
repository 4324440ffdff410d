"""GPT-2, GPT-BigCode (StarCoder) and OPT: learned positions, LayerNorm, biases, a plain MLP. Read it top to bottom.

Config, tensors, forward pass. It does not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ModelError
from octavo.kernels.ops import F32, I32, AttentionBatch, KVLayer, Ops, PackedLinear
from octavo.models.config import check_heads, check_number, check_sizes
from octavo.models.config_gguf import Keys, vocab_size_of
from octavo.models.config_json import Fields, equal_share
from octavo.models.family import Family
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Rows, Vector, linear
from octavo.models.rope import RopeTables
from octavo.models.step_rows import Scratch, are_all_rows, num_positions, one_row_each, positions, weigh

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True, slots=True)
class GptConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    layer_norm_eps: float
    max_position_embeddings: int
    activation: str = "gelu_tanh"  # of `Ops.activation`
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

    @property
    def position_offset(self) -> int:
        """The row of the position table that is of position 0."""
        return 2 if self.architecture == "OPTForCausalLM" else 0


def gpt_from_json(architecture: str, fields: Fields) -> GptConfig:
    return _opt_from_json(fields) if architecture == "OPTForCausalLM" else _gpt2_from_json(architecture, fields)


def _gpt2_from_json(architecture: str, fields: Fields) -> GptConfig:
    fields.refuse_other("scale_attn_weights", True)
    fields.refuse_other("scale_attn_by_inverse_layer_idx", False)
    fields.refuse_other("add_cross_attention", False)
    fields.refuse_other("multi_query", True)
    is_gpt2 = architecture == "GPT2LMHeadModel"
    hidden_size, num_heads = fields.integer("n_embd", 768), fields.integer("n_head", 12)
    return GptConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", 50257),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_layers=fields.integer("n_layer", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads if is_gpt2 else 1,
        layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=fields.integer("n_positions", 1024),
        activation=_activation(fields, "gelu_new" if is_gpt2 else "gelu_pytorch_tanh"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _opt_from_json(fields: Fields) -> GptConfig:
    hidden_size, num_heads = fields.integer("hidden_size", 768), fields.integer("num_attention_heads", 12)
    fields.refuse_other("do_layer_norm_before", True)
    fields.refuse_other("_remove_final_layer_norm", False)
    fields.refuse_other("enable_bias", True)
    fields.refuse_other("layer_norm_elementwise_affine", True)
    fields.refuse_other("word_embed_proj_dim", hidden_size)
    return GptConfig(
        architecture="OPTForCausalLM",
        vocab_size=fields.integer("vocab_size", 50272),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim", 3072),
        num_layers=fields.integer("num_hidden_layers", 12),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        layer_norm_eps=1e-5,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        activation=_activation(fields, "relu"),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _activation(fields: Fields, default: str) -> str:
    name = fields.text("activation_function", default)
    if name not in _ACTIVATIONS:
        raise ModelError(
            f"config.json: activation_function {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def gpt_from_gguf(keys: Keys) -> GptConfig:
    num_heads = keys.integer("attention.head_count")
    return GptConfig(
        architecture=_GGUF_NAMES[keys.architecture],
        vocab_size=vocab_size_of(keys),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        layer_norm_eps=keys.number("attention.layer_norm_epsilon"),
        max_position_embeddings=keys.integer("context_length"),
        tie_word_embeddings="output.weight" not in keys.shapes,
    )


_GPT2 = Names(
    "transformer.h.{}.",
    {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn",
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
)
_OPT = Names(
    "model.decoder.layers.{}.",
    {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "final_norm": "model.decoder.final_layer_norm",
        "head": "lm_head",
        "attention_norm": "self_attn_layer_norm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    },
)
_GGUF = Names(
    "blk.{}.",
    {
        "embedding": "token_embd",
        "positions": "position_embd",
        "final_norm": "output_norm",
        "head": "output",
        "attention_norm": "attn_norm",
        "qkv": "attn_qkv",
        "output": "attn_output",
        "mlp_norm": "ffn_norm",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)


def gpt_parts(config: GptConfig, is_gguf: bool) -> Parts:
    is_opt = config.architecture == "OPTForCausalLM"
    names = _GGUF if is_gguf else _OPT if is_opt else _GPT2
    is_turned = not is_gguf and config.architecture == "GPT2LMHeadModel"  # its files store [inputs, outputs]
    hidden, inner, kv_size = config.hidden_size, config.intermediate_size, config.num_kv_heads * config.head_dim

    def rows(word: str, layer: int, num_outputs: int, num_inputs: int) -> Rows:
        usual = linear(names(word, layer), num_outputs, num_inputs, has_bias=True)
        if not is_turned:
            return usual
        return Rows(usual.tensor, (num_inputs, num_outputs), usual.bias, usual.bias_shape, change=_turn)

    num_rows = config.max_position_embeddings + config.position_offset
    embedding = linear(names("embedding"), config.vocab_size, hidden)
    matrices = [Matrix("embedding", (embedding,), is_of_vocabulary=True)]
    vectors = [Vector("positions", f"{names('positions')}.weight", (num_rows, hidden))]
    norms = [("final_norm", names("final_norm"))]
    for i in range(config.num_layers):
        sizes = (("q", hidden), ("k", kv_size), ("v", kv_size)) if is_opt else (("qkv", hidden + 2 * kv_size),)
        matrices += [
            Matrix(f"{i}.qkv", tuple(rows(word, i, size, hidden) for word, size in sizes)),
            Matrix(f"{i}.output", (rows("output", i, hidden, hidden),)),
            Matrix(f"{i}.up", (rows("up", i, inner, hidden),)),
            Matrix(f"{i}.down", (rows("down", i, hidden, inner),)),
        ]
        norms += [(f"{i}.{word}", names(word, i)) for word in ("attention_norm", "mlp_norm")]
    for key, stem in norms:
        vectors += [Vector(f"{key}.{end}", f"{stem}.{end}", (hidden,)) for end in ("weight", "bias")]
    if not config.tie_word_embeddings:
        matrices.append(Matrix("head", (linear(names("head"), config.vocab_size, hidden),), is_of_vocabulary=True))
    ignored = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files hold
    return Parts(tuple(matrices), tuple(vectors), frozenset({f"{names('head')}.weight"}), () if is_opt else ignored)


def _turn(weight: F32) -> F32:
    return weight.T


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: F32  # [hidden_size]
    bias: F32  # [hidden_size]


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: PackedLinear  # hidden_size -> q | k | v
    output: PackedLinear  # hidden_size -> hidden_size
    mlp_norm: _Norm
    up: PackedLinear  # hidden_size -> intermediate_size
    down: PackedLinear  # intermediate_size -> hidden_size


class GptModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: GptConfig, packed: Packed, ops: Ops) -> None:
        def norm(key: str) -> _Norm:
            return _Norm(packed.vectors[f"{key}.weight"], packed.vectors[f"{key}.bias"])

        matrices = packed.matrices
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding = matrices["embedding"]
        self._head = matrices.get("head", self._embedding)
        self._positions = packed.vectors["positions"][config.position_offset :]  # [max_position_embeddings, hidden]
        self._final_norm = norm("final_norm")
        self._layers = tuple(
            _Layer(
                attention_norm=norm(f"{i}.attention_norm"),
                qkv=matrices[f"{i}.qkv"],
                output=matrices[f"{i}.output"],
                mlp_norm=norm(f"{i}.mlp_norm"),
                up=matrices[f"{i}.up"],
                down=matrices[f"{i}.down"],
            )
            for i in range(config.num_layers)
        )
        self._no_rope = RopeTables(np.empty(0, np.float32), config.max_position_embeddings)
        self._scratch = Scratch()

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        config = self.config
        return build_groups([LayerGeometry(config.num_kv_heads, config.head_dim, kv_format)] * config.num_layers)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config, num_tokens = self._ops, self.config, len(token_ids)
        rope = self._no_rope.upto(num_positions(batch))
        hidden = self._scratch.rows("hidden", num_tokens, config.hidden_size)
        normed = self._scratch.rows("normed", num_tokens, config.hidden_size)
        qkv = self._scratch.rows("qkv", num_tokens, self._layers[0].qkv.num_outputs)
        q = self._scratch.heads("q", num_tokens, config.num_heads, config.head_dim)

        ops.embedding(self._embedding, token_ids, hidden)
        hidden += self._positions[positions(batch)]
        for index, (layer, kv) in enumerate(zip(self._layers, kv_layers, strict=True)):
            self._norm(hidden, layer.attention_norm, normed)
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
            ops.paged_attention(q, batch, kv, config.head_dim**-0.5, attended)
            ops.linear(attended.reshape(len(hidden), -1), layer.output, hidden, accumulate=True)

            inner = self._scratch.rows("inner", len(hidden), config.intermediate_size)
            self._norm(hidden, layer.mlp_norm, normed)
            ops.linear(normed, layer.up, inner)
            ops.activation(inner, config.activation, inner)
            ops.linear(inner, layer.down, hidden, accumulate=True)

        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            self._norm(hidden, self._final_norm, normed)
            ops.linear(normed, self._head, logits)
        return logits

    def _norm(self, x: F32, norm: _Norm, out: F32) -> None:
        self._ops.layer_norm(x, norm.weight, norm.bias, self.config.layer_norm_eps, out)


_GGUF_NAMES = {"gpt2": "GPT2LMHeadModel", "starcoder": "GPTBigCodeForCausalLM"}
FAMILY = Family(
    architectures=("GPT2LMHeadModel", "GPTBigCodeForCausalLM"),
    model_types={"gpt2": "GPT2LMHeadModel", "gpt_bigcode": "GPTBigCodeForCausalLM"},
    gguf_names=_GGUF_NAMES,
    from_json=gpt_from_json,
    from_gguf=gpt_from_gguf,
    parts=gpt_parts,
    build=GptModel,
    prefix="transformer.",
)
OPT_FAMILY = Family(
    architectures=("OPTForCausalLM",),
    model_types={"opt": "OPTForCausalLM"},
    gguf_names={},
    from_json=gpt_from_json,
    parts=gpt_parts,
    build=GptModel,
    prefix="model.",
)
