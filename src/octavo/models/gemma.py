"""Gemma 1, 2 and 3, text only: scaled embeddings, norms before and after, mixed windows, soft caps. Top to bottom.

Config, tensors, forward pass. Norm weights of safetensors are stored less 1, those of GGUF as they are used. It does
not know requests, files or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ModelError
from octavo.kernels.ops import F32, I32, AttentionBatch, AttentionProjection, DecoderLayer, DecoderRows, KVLayer, Ops
from octavo.models.balance import balanced_norms, key_scales, positions
from octavo.models.config import RopeConfig, check_heads, check_number, check_sizes, check_windows
from octavo.models.config_gguf import Keys, head_dim_of, rope_of, vocab_size_of
from octavo.models.config_json import Fields, layer_windows, num_kv_heads, read_rope, rope_scaling
from octavo.models.decoder import DecoderScratch, run_decoder
from octavo.models.family import Family
from octavo.models.names import Names
from octavo.models.packing import Packed
from octavo.models.parts import Matrix, Parts, Vector, linear
from octavo.models.rope import rope_tables
from octavo.models.step_rows import num_positions

_LOCAL_THETA = 10000.0  # of Gemma 3's window layers
_PATTERNS = {"GemmaForCausalLM": 1, "Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}  # every n-th layer sees everything
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
# GGUF files do not say that the attention scale of the 27B models follows hidden_size / num_heads: layers tell them.
_LAYERS_OF_27B = {"Gemma2ForCausalLM": 46, "Gemma3ForCausalLM": 62}


@dataclass(frozen=True, slots=True)
class GemmaConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig  # of layers that see everything
    local_rope: RopeConfig  # of layers with a window
    max_position_embeddings: int
    windows: tuple[int | None, ...]  # of each layer; None: all
    query_scalar: float  # scores are divided by its root
    activation: str = "gelu_tanh"
    attention_cap: float | None = None  # soft cap of scores
    final_cap: float | None = None  # soft cap of logits
    dtype: str = "f32"

    def __post_init__(self) -> None:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_sizes({name: getattr(self, name) for name in (*names, "max_position_embeddings")})
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_windows(self.windows)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_number("query_pre_attn_scalar", self.query_scalar)
        for name, cap in (("attn_logit_softcapping", self.attention_cap), ("final_logit_softcapping", self.final_cap)):
            if cap is not None:
                check_number(name, cap)

    @property
    def has_post_norms(self) -> bool:
        return self.architecture != "GemmaForCausalLM"

    @property
    def has_head_norms(self) -> bool:
        return self.architecture == "Gemma3ForCausalLM"


def gemma_from_json(architecture: str, fields: Fields) -> GemmaConfig:
    """What is left out is as transformers' config classes have it."""
    num_heads, num_layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    is_first, is_second = architecture == "GemmaForCausalLM", architecture == "Gemma2ForCausalLM"
    if fields.flag("use_bidirectional_attention") or fields.flag("attention_bias"):
        raise ModelError("config.json: Gemma with bidirectional attention or attention_bias is not supported")
    activation = fields.text("hidden_activation", fields.text("hidden_act", "gelu_pytorch_tanh"))
    if activation not in _ACTIVATIONS:
        raise ModelError(f"config.json: hidden_activation {activation!r} is not supported; there is gelu_pytorch_tanh")
    window = None if is_first else fields.optional_integer("sliding_window", 4096)
    pattern = fields.integer("sliding_window_pattern", _PATTERNS[architecture])
    max_positions = fields.integer("max_position_embeddings", 131072 if not (is_first or is_second) else 8192)
    rope = read_rope(
        fields, max_positions, rope_scaling(fields.data, "full_attention"), 1e4 if is_first or is_second else 1e6
    )
    local = rope_scaling(fields.data, "sliding_attention") if "rope_parameters" in fields.data else {}
    local_theta = Fields(local).number("rope_theta", fields.number("rope_local_base_freq", _LOCAL_THETA))
    head_dim = fields.integer("head_dim", 256)
    cap = (None, 50.0, 30.0) if is_second else (None, None, None)
    return GemmaConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=rope if is_first or is_second else RopeConfig(local_theta),
        max_position_embeddings=max_positions,
        windows=layer_windows(fields, num_layers, window, _layer_types(num_layers, pattern)),
        query_scalar=float(head_dim) if is_first else fields.number("query_pre_attn_scalar", 256),
        activation=_ACTIVATIONS[activation],
        attention_cap=None if is_first else fields.optional_number("attn_logit_softcapping", cap[1]),
        final_cap=None if is_first else fields.optional_number("final_logit_softcapping", cap[2]),
    )


def _layer_types(num_layers: int, pattern: int) -> list[str]:
    if pattern < 1 or not 1 <= num_layers <= 4096:
        raise ModelError(
            f"config.json: sliding_window_pattern {pattern} of {num_layers} layers cannot be: it is damaged"
        )
    return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(num_layers)]


def gemma_from_gguf(keys: Keys) -> GemmaConfig:
    architecture = _GGUF_NAMES[keys.architecture]
    num_heads, hidden_size = keys.integer("attention.head_count"), keys.integer("embedding_length")
    num_layers, window = keys.integer("block_count"), keys.integer("attention.sliding_window", 0) or None
    head_dim = head_dim_of(keys, hidden_size, num_heads)
    is_third = architecture == "Gemma3ForCausalLM"
    rope = rope_of(keys, 1e6 if is_third else 1e4)
    types = _layer_types(num_layers, _PATTERNS[architecture])
    is_large = _LAYERS_OF_27B.get(architecture) == num_layers
    caps = [keys.number(name, 0.0) or None for name in ("attn_logit_softcapping", "final_logit_softcapping")]
    return GemmaConfig(
        architecture=architecture,
        vocab_size=vocab_size_of(keys),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=keys.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=RopeConfig(keys.number("rope.freq_base_swa", _LOCAL_THETA)) if is_third else rope,
        max_position_embeddings=keys.integer("context_length"),
        windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        query_scalar=hidden_size / num_heads if is_large else float(head_dim),
        attention_cap=caps[0],
        final_cap=caps[1],
    )


_HUGGING_FACE = Names(
    "model.layers.{}.",
    {
        "embedding": "model.embed_tokens",
        "final_norm": "model.norm",
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
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
        "attention_norm": "attn_norm",
        "q": "attn_q",
        "k": "attn_k",
        "v": "attn_v",
        "output": "attn_output",
        "q_norm": "attn_q_norm",
        "k_norm": "attn_k_norm",
        "post_attention_norm": "post_attention_norm",
        "mlp_norm": "ffn_norm",
        "post_mlp_norm": "post_ffw_norm",
        "gate": "ffn_gate",
        "up": "ffn_up",
        "down": "ffn_down",
    },
)
_FIRST = Names("model.layers.{}.", {**_HUGGING_FACE.of, "mlp_norm": "post_attention_layernorm"})


def gemma_parts(config: GemmaConfig, is_gguf: bool) -> Parts:
    names = _GGUF if is_gguf else _HUGGING_FACE if config.has_post_norms else _FIRST
    hidden, inner, added = config.hidden_size, config.intermediate_size, 0.0 if is_gguf else 1.0
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    matrices = [Matrix("embedding", (linear(names("embedding"), config.vocab_size, hidden),), is_of_vocabulary=True)]
    vectors = [Vector("final_norm", f"{names('final_norm')}.weight", (hidden,), added)]
    norms = {"attention_norm": hidden, "mlp_norm": hidden}
    if config.has_post_norms:
        norms |= {"post_attention_norm": hidden, "post_mlp_norm": hidden}
    if config.has_head_norms:
        norms |= {"q_norm": config.head_dim, "k_norm": config.head_dim}
    for i in range(config.num_layers):
        sizes = (("q", q_size), ("k", kv_size), ("v", kv_size))
        matrices += [
            Matrix(f"{i}.qkv", tuple(linear(names(word, i), size, hidden) for word, size in sizes)),
            Matrix(f"{i}.output", (linear(names("output", i), hidden, q_size),)),
            Matrix(f"{i}.gate_up", tuple(linear(names(word, i), inner, hidden) for word in ("gate", "up"))),
            Matrix(f"{i}.down", (linear(names("down", i), hidden, inner),)),
        ]
        vectors += [Vector(f"{i}.{word}", f"{names(word, i)}.weight", (size,), added) for word, size in norms.items()]
    head = "output.weight" if is_gguf else "lm_head.weight"  # a tied head that is stored once more
    return Parts(tuple(matrices), tuple(vectors), frozenset({head}))


class GemmaModel:
    """One model, its weights packed. Owned by one thread: its scratch buffers are used by every call."""

    def __init__(self, config: GemmaConfig, packed: Packed, ops: Ops) -> None:
        self.config = config
        self.weights_bytes = packed.num_bytes
        self._ops = ops
        self._embedding, self._final_norm = packed.matrices["embedding"], packed.vectors["final_norm"]
        self._layers = tuple(_layer(config, packed, index) for index in range(config.num_layers))
        self._rope = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._local_rope = rope_tables(config.local_rope, config.head_dim, config.max_position_embeddings)
        self._scratch = DecoderScratch(config.hidden_size, config.num_heads, config.head_dim)

    def kv_groups(self, kv_format: str) -> tuple[KVGroupSpec, ...]:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return build_groups([LayerGeometry(heads, dim, kv_format, window) for window in self.config.windows])

    def key_scales(self) -> tuple[F32, ...]:
        """As `Family.key_scales`."""
        config, found = self.config, []
        ropes = [rope.upto(positions(config.max_position_embeddings)) for rope in (self._rope, self._local_rope)]
        for layer in self._layers:
            if layer.attention.k_norm is not None:
                rope = ropes[layer.rope]
                found.append(key_scales(self._ops, layer.attention, config.num_kv_heads, config.head_dim, rope))
        return tuple(found)

    def prepare(self, num_rows: int) -> bool:
        """As `Family.prepare`."""
        return self._scratch.prepare(num_rows)

    def forward(self, token_ids: I32, batch: AttentionBatch, kv_layers: Sequence[KVLayer], logits_rows: I32) -> F32:
        """As `CausalLM.forward`: token_ids [num_tokens], logits_rows [n] -> a new array [n, vocab_size]."""
        ops, config = self._ops, self.config
        ropes = [rope.upto(num_positions(batch)) for rope in (self._rope, self._local_rope)]
        hidden, heads = self._scratch.take(len(token_ids))
        ops.embedding(self._embedding, token_ids, hidden)
        hidden *= np.float32(config.hidden_size**0.5)
        rows = DecoderRows(hidden, batch, ropes, heads)
        hidden = run_decoder(ops, self._layers, kv_layers, rows, logits_rows)
        logits = np.empty((len(logits_rows), config.vocab_size), np.float32)
        if len(logits_rows):
            ops.norm_linear(hidden, self._final_norm, config.rms_norm_eps, self._embedding, logits)
            if config.final_cap is not None:
                ops.soft_cap(logits, config.final_cap, logits)
        return logits


def _layer(config: GemmaConfig, packed: Packed, i: int) -> DecoderLayer:
    matrices, vectors, eps = packed.matrices, packed.vectors, config.rms_norm_eps
    q_norm, k_norm = balanced_norms(vectors.get(f"{i}.q_norm"), vectors.get(f"{i}.k_norm"))
    return DecoderLayer(
        attention=AttentionProjection(vectors[f"{i}.attention_norm"], eps, matrices[f"{i}.qkv"], q_norm, k_norm),
        output=matrices[f"{i}.output"],
        mlp_norm=vectors[f"{i}.mlp_norm"],
        gate_up=matrices[f"{i}.gate_up"],
        down=matrices[f"{i}.down"],
        scale=config.query_scalar**-0.5,
        window=config.windows[i] or 0,
        softcap=config.attention_cap or 0.0,
        gate=config.activation,
        post_attention_norm=vectors.get(f"{i}.post_attention_norm"),
        post_mlp_norm=vectors.get(f"{i}.post_mlp_norm"),
        rope=0 if config.windows[i] is None else 1,
    )


_GGUF_NAMES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM"}
FAMILY = Family(
    architectures=("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    model_types={"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"},
    gguf_names=_GGUF_NAMES,
    from_json=gemma_from_json,
    from_gguf=gemma_from_gguf,
    parts=gemma_parts,
    build=GemmaModel,
    in_blocks=True,
    prepare=GemmaModel.prepare,
    key_scales=GemmaModel.key_scales,
    why_uncounted=lambda config: None if config.attention_cap is None else "caps its attention scores",
)
