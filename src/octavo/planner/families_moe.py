"""Decoders with experts behind ordinary attention.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
"""

from __future__ import annotations

from octavo.planner.draft import Draft, Heads
from octavo.planner.families_dense import PRE, mixed_attention
from octavo.planner.windows import CHUNKED, layers_of_types, window_layers


def mixtral(draft: Draft) -> None:
    window = draft.fields.get("sliding_window")
    mixed_attention(draft, draft.layers, window if window is None else draft.fields.integer("sliding_window"))
    draft.moe(draft.fields.integer("intermediate_size"), draft.layers, name="block_sparse_moe")
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def phimoe(draft: Draft) -> None:
    """Mixtral with biases and layer norms."""
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    draft.moe(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True, head_bias=draft.fields.flag("lm_head_bias"))


def qwen2_moe(draft: Draft) -> None:
    windowed, window = window_layers(draft)
    mixed_attention(draft, windowed, window, bias=draft.fields.flag("qkv_bias", True))
    _qwen_experts(draft, shared=draft.fields.integer("shared_expert_intermediate_size", 5632))
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def qwen3_moe(draft: Draft) -> None:
    windowed, window = window_layers(draft)
    bias = draft.fields.flag("attention_bias")
    mixed_attention(draft, windowed, window, bias=bias, out_bias=bias, qk_norm="head")
    _qwen_experts(draft, shared=0)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def _qwen_experts(draft: Draft, shared: int) -> None:
    """Layers with experts: each `decoder_sparse_step`-th, but for those that `mlp_only_layers` names."""
    fields = draft.fields
    step = fields.integer("decoder_sparse_step", 1)
    dense = set(fields.layers("mlp_only_layers"))
    sparse = [layer for layer in draft.layers if layer not in dense and (layer + 1) % step == 0]
    draft.moe(fields.integer("moe_intermediate_size"), sparse)
    if shared and sparse:
        draft.mlp(shared, sparse, name="mlp.shared_expert")
        draft.matrix("mlp.shared_expert_gate", 1, draft.hidden, sparse)
    rest = [layer for layer in draft.layers if layer not in set(sparse)]
    if rest:
        draft.mlp(fields.integer("intermediate_size"), rest)


def olmoe(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias, qk_norm="all")
    draft.moe(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def granitemoe(draft: Draft) -> None:
    draft.attention(draft.heads(), draft.layers)
    shared = draft.fields.integer("shared_intermediate_size", 0, least=0)
    draft.moe(draft.fields.integer("intermediate_size"), draft.layers, shared=shared)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def dbrx(draft: Draft) -> None:
    """Layer norms without a bias; its numbers stand in sections."""
    attention, experts = draft.fields.section("attn_config"), draft.fields.section("ffn_config")
    num_heads = draft.fields.integer("num_attention_heads")
    kv = num_heads if attention is None else attention.integer("num_key_value_heads", num_heads)
    head_dim = draft.head_dim(num_heads)
    draft.attention(draft.checked(Heads(num_heads, kv, head_dim, head_dim)), draft.layers)
    assert experts is not None
    outer, draft.fields = draft.fields, experts
    draft.moe(experts.integer("intermediate_size"), draft.layers, name="ffn")
    draft.fields = outer
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def deepseek_moe(draft: Draft) -> None:
    """The first DeepSeek with experts: ordinary heads."""
    draft.attention(draft.heads(), draft.layers)
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def deepseek_experts(draft: Draft, *, name: str = "mlp") -> None:
    """The first `first_k_dense_replace` layers are dense; shared experts are as wide as `n_shared_experts` others."""
    fields = draft.fields
    if not fields.has("num_experts"):
        draft.mlp(fields.integer("intermediate_size"), draft.layers)
        return
    first = fields.integer("first_k_dense_replace", 0, least=0)
    freq = fields.get("moe_layer_freq")
    if isinstance(freq, list):
        marks = fields.per_layer("moe_layer_freq", draft.num_layers) or []
        sparse = [layer for layer in draft.layers if marks[layer]]
    else:
        step = fields.integer("moe_layer_freq", 1)
        sparse = [layer for layer in draft.layers if layer >= first and layer % step == 0]
    width = fields.integer("moe_intermediate_size")
    shared = width * fields.integer("n_shared_experts", 0, least=0)
    draft.moe(width, sparse, shared=fields.integer("share_expert_dim", shared, least=0), name=name)
    dense = [layer for layer in draft.layers if layer not in set(sparse)]
    if dense:
        draft.mlp(fields.integer("dense_intermediate_size", fields.integer("intermediate_size")), dense, name=name)


def glm4_moe(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias")
    qk_norm = "head" if draft.fields.flag("use_qk_norm") else ""
    draft.attention(draft.heads(), draft.layers, bias=bias, qk_norm=qk_norm)
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def gpt_oss(draft: Draft) -> None:
    """Every second layer has the window; biases everywhere; one more logit per head (a sink)."""
    fields = draft.fields
    windowed, window = layers_of_types(draft, every=2)
    bias = fields.flag("attention_bias", True)
    mixed_attention(draft, windowed, window, bias=bias, out_bias=bias)
    draft.vector("self_attn.sinks", fields.integer("num_attention_heads"), draft.layers)
    number, width = fields.integer("num_experts"), fields.integer("intermediate_size")
    used = fields.integer("num_experts_per_tok", fields.integer("experts_per_token", 4))
    draft.matrix("mlp.router", number, draft.hidden, draft.layers, bias=True)
    draft.experts("mlp.experts.gate_up_proj", 2 * width, draft.hidden, draft.layers, (number, used))
    draft.experts("mlp.experts.down_proj", draft.hidden, width, draft.layers, (number, used))
    draft.vector("mlp.experts.gate_up_proj_bias", number * 2 * width, draft.layers)
    draft.vector("mlp.experts.down_proj_bias", number * draft.hidden, draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def llama4(draft: Draft) -> None:
    """Three of four layers see their chunk only; experts in each `interleave_moe_layer_step`-th layer."""
    fields = draft.fields
    chunk = fields.integer("attention_chunk_size", 8192)
    heads = draft.heads()
    types = fields.per_layer("layer_types", draft.num_layers)
    marks = fields.per_layer("no_rope_layers", draft.num_layers) if fields.sequence("no_rope_layers") else None
    if types is not None:
        local = [layer for layer in draft.layers if types[layer] in CHUNKED]
    elif marks is not None:
        local = [layer for layer in draft.layers if marks[layer]]
    else:
        every = fields.integer("no_rope_layer_interval", 4)
        local = [layer for layer in draft.layers if (layer + 1) % every]
    full = [layer for layer in draft.layers if layer not in set(local)]
    bias = fields.flag("attention_bias")
    if full:
        draft.attention(heads, full, bias=bias, out_bias=bias)
    if local:
        chunked = Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.v_head_dim, chunk, "chunk")
        draft.attention(chunked, local, bias=bias, out_bias=bias)
    step = fields.integer("interleave_moe_layer_step", 1)
    named = fields.layers("moe_layers")
    sparse = named if named else [layer for layer in draft.layers if (layer + 1) % step == 0]
    width = fields.integer("intermediate_size")
    draft.moe(width, sparse, shared=width, name="feed_forward")
    dense = [layer for layer in draft.layers if layer not in set(sparse)]
    if dense:
        draft.mlp(fields.integer("intermediate_size_mlp", 16384), dense, name="feed_forward")
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def minimax_m2(draft: Draft) -> None:
    qk_norm = "all" if draft.fields.flag("use_qk_norm", True) else ""
    draft.attention(draft.heads(), draft.layers, qk_norm=qk_norm)
    draft.moe(draft.fields.integer("intermediate_size"), draft.layers, name="block_sparse_moe")
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def step3p7(draft: Draft) -> None:
    windowed, window = layers_of_types(draft, every=4)
    mixed_attention(draft, windowed, window, qk_norm="head")
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)
    draft.exact = False
    draft.notes.append("parameters: gates and norms that this config does not describe are not counted")


def mimo_v2(draft: Draft) -> None:
    """Windowed layers with heads of their own number, values shorter than keys, and sinks."""
    fields = draft.fields
    own = draft.heads()
    heads = Heads(own.num_heads, own.num_kv_heads, own.head_dim, fields.integer("v_head_dim", own.head_dim))
    pattern = fields.per_layer("hybrid_layer_pattern", draft.num_layers) or [0] * draft.num_layers
    local = [layer for layer in draft.layers if pattern[layer]]
    full = [layer for layer in draft.layers if not pattern[layer]]
    bias = fields.flag("attention_bias")
    draft.attention(heads, full, bias=bias)
    if local:
        swa = Heads(
            fields.integer("swa_num_attention_heads", heads.num_heads),
            fields.integer("swa_num_key_value_heads", heads.num_kv_heads),
            fields.integer("swa_head_dim", heads.head_dim),
            fields.integer("swa_v_head_dim", heads.v_head_dim),
            fields.integer("sliding_window"),
            "window",
        )
        draft.attention(draft.checked(swa), local, bias=bias)
        if fields.flag("add_swa_attention_sink_bias"):
            draft.vector("self_attn.attention_sink_bias", swa.num_heads, local)
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)
