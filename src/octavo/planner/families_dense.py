"""Dense decoders of the Llama kind: RMS or layer norms, attention with q, k, v and o, and an MLP with a gate.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.planner.draft import Draft, Heads
from octavo.planner.windows import layers_of_types, window_layers

PRE = ("input_layernorm", "post_attention_layernorm")
AROUND = (*PRE, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def mixed_attention(
    draft: Draft,
    windowed: Sequence[int],
    window: int | None,
    *,
    bias: bool = False,
    out_bias: bool = False,
    qk_norm: str = "",
) -> None:
    """Attention of all layers, of which some look at a window only."""
    heads = draft.heads()
    inside = set(windowed) if window is not None else set()
    full = [layer for layer in draft.layers if layer not in inside]
    if full:
        draft.attention(heads, full, bias=bias, out_bias=out_bias, qk_norm=qk_norm)
    if inside:
        local = Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.v_head_dim, window, "window")
        draft.attention(local, sorted(inside), bias=bias, out_bias=out_bias, qk_norm=qk_norm)


def llama(draft: Draft) -> None:
    fields = draft.fields
    bias = fields.flag("attention_bias", fields.flag("bias"))
    mixed_attention(draft, (), None, bias=bias, out_bias=bias)
    draft.mlp(fields.integer("intermediate_size"), draft.layers, bias=fields.flag("mlp_bias"))
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def tied_llama(draft: Draft) -> None:
    """The same, where a config that does not say so means one table for embedding and head."""
    draft.fields = draft.fields.filled({"tie_word_embeddings": True})
    llama(draft)


def mistral(draft: Draft) -> None:
    """All layers have the window, where there is one."""
    window = draft.fields.get("sliding_window")
    mixed_attention(draft, draft.layers, window if window is None else draft.fields.integer("sliding_window"))
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def qwen2(draft: Draft) -> None:
    """Biases on q, k and v; a window on the layers from `max_window_layers` on, where it is switched on."""
    windowed, window = window_layers(draft)
    mixed_attention(draft, windowed, window, bias=True)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def qwen3(draft: Draft) -> None:
    windowed, window = window_layers(draft)
    bias = draft.fields.flag("attention_bias")
    mixed_attention(draft, windowed, window, bias=bias, out_bias=bias, qk_norm="head")
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def qwen(draft: Draft) -> None:
    """The first Qwen: biases on q, k and v, and an MLP whose width is half of what its config says."""
    draft.attention(draft.heads(), draft.layers, bias=True)
    draft.mlp(draft.fields.integer("intermediate_size") // 2, draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def phi3(draft: Draft) -> None:
    """Fused matrices, the same numbers. The window holds where it is shorter than the context."""
    window = draft.fields.get("sliding_window")
    longest = draft.fields.integer("max_position_embeddings", 4096)
    is_short = window is not None and draft.fields.integer("sliding_window") < longest
    mixed_attention(draft, draft.layers if is_short else (), window if is_short else None)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def layer_norm_llama(draft: Draft) -> None:
    """Orion: Llama with layer norms."""
    draft.attention(draft.heads(), draft.layers)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True)


def stablelm(draft: Draft) -> None:
    fields = draft.fields
    heads = draft.heads()
    draft.attention(heads, draft.layers, bias=fields.flag("use_qkv_bias"))
    if fields.flag("qk_layernorm"):
        draft.norms(["self_attn.q_layernorm"], draft.layers, width=heads.num_heads * heads.head_dim)
        draft.norms(["self_attn.k_layernorm"], draft.layers, width=heads.num_kv_heads * heads.head_dim)
    draft.mlp(fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE[:1] if fields.flag("use_parallel_residual") else PRE, draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True)


def cohere(draft: Draft) -> None:
    """Command R: attention and MLP side by side behind one norm without a bias; the head is the embedding."""
    fields = draft.fields
    heads = draft.heads()
    windowed, window = layers_of_types(draft, every=fields.integer("sliding_window_pattern", 4))
    is_second = draft.fields.has("sliding_window")
    bias = fields.flag("attention_bias")
    mixed_attention(draft, windowed if is_second else (), window if is_second else None, bias=bias, out_bias=bias)
    if fields.flag("use_qk_norm"):
        draft.norms(["self_attn.q_norm"], draft.layers, width=heads.num_heads * heads.head_dim)
        draft.norms(["self_attn.k_norm"], draft.layers, width=heads.num_kv_heads * heads.head_dim)
    draft.mlp(fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE[:1], draft.layers)
    draft.ends(tied=True)


def olmo(draft: Draft) -> None:
    """Norms without parameters."""
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.ends(tied=False, norm=False)


def olmo2(draft: Draft) -> None:
    """Norms behind attention and MLP; q and k are normed over all heads. OLMo 3 adds windows."""
    windowed, window = layers_of_types(draft, every=4)
    bias = draft.fields.flag("attention_bias")
    has_window = draft.fields.has("sliding_window")
    mixed_attention(
        draft,
        windowed if has_window else (),
        window if has_window else None,
        bias=bias,
        out_bias=bias,
        qk_norm="all",
    )
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(("post_attention_layernorm", "post_feedforward_layernorm"), draft.layers)
    draft.ends(tied=False)


def exaone4(draft: Draft) -> None:
    windowed, window = layers_of_types(draft, every=4)
    has_window = draft.fields.has("sliding_window")
    mixed_attention(draft, windowed if has_window else (), window if has_window else None, qk_norm="head")
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(("post_attention_layernorm", "post_feedforward_layernorm"), draft.layers)
    draft.ends(tied=False)


def glm(draft: Draft) -> None:
    """GLM-4: biases on q, k and v; the second of its kind has four norms a layer."""
    draft.attention(draft.heads(), draft.layers, bias=draft.fields.flag("attention_bias"))
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(AROUND if draft.fields.text("model_type") == "glm4" else PRE, draft.layers)
    draft.ends(tied=False)


def chatglm(draft: Draft) -> None:
    """ChatGLM 2 and 3: two KV heads where `multi_query_attention` says so."""
    fields = draft.fields
    num_heads = fields.integer("num_attention_heads")
    kv = fields.integer("num_key_value_heads", num_heads) if fields.flag("multi_query_attention") else num_heads
    head_dim = draft.head_dim(num_heads)
    heads = draft.checked(Heads(num_heads, kv, head_dim, head_dim))
    every, bias = fields.flag("add_bias_linear"), fields.flag("add_qkv_bias")
    draft.attention(heads, draft.layers, bias=bias or every, out_bias=every)
    draft.mlp(fields.integer("intermediate_size"), draft.layers, bias=every)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def seed_oss(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias", True)
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=draft.fields.flag("attention_out_bias"))
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers, bias=draft.fields.flag("mlp_bias"))
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def hunyuan(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias, qk_norm="head")
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def nemotron(draft: Draft) -> None:
    """Squared ReLU in place of a gate; layer norms."""
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers, gated=False, bias=draft.fields.flag("mlp_bias"))
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True)


def arcee(draft: Draft) -> None:
    draft.attention(draft.heads(), draft.layers)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers, gated=False)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def starcoder2(draft: Draft) -> None:
    """Biases everywhere; layer norms; no gate."""
    bias = draft.fields.flag("use_bias", True)
    window = draft.fields.integer("sliding_window") if draft.fields.has("sliding_window") else None
    mixed_attention(draft, draft.layers, window, bias=bias, out_bias=bias)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers, gated=False, bias=bias)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=True, norm_bias=True)


def mllama(draft: Draft) -> None:
    """Llama 3.2 Vision: some layers look at the image's keys, which do not grow with the text."""
    fields = draft.fields
    cross = tuple(layer for layer in fields.layers("cross_attention_layers") if layer < draft.num_layers)
    own = [layer for layer in draft.layers if layer not in cross]
    heads = draft.heads()
    draft.attention(heads, own)
    if cross:
        kept = list(draft.groups)
        draft.attention(heads, cross, qk_norm="head", name="cross_attn")
        draft.groups = kept
        draft.notes.append(f"{len(cross)} layers read the image's keys and values; they hold nothing per text token")
        for gate in ("cross_attn_attn_gate", "cross_attn_mlp_gate"):
            draft.vector(gate, 1, cross)
    draft.mlp(fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)
    draft.resize_embedding(draft.vocab + 8)  # eight rows for the image's own tokens
