"""The older decoders: GPT-2 and what came of it. Layer norms, mostly biases, an MLP without a gate.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
"""

from __future__ import annotations

from octavo.planner.draft import Draft, Heads

PRE = ("ln_1", "ln_2")


def gpt2(draft: Draft) -> None:
    """Positions are learned; the head is the embedding."""
    draft.attention(draft.heads(), draft.layers, bias=True, out_bias=True)
    _plain_mlp(draft, bias=True)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=True, norm_bias=True)
    draft.lookup("model.wpe", draft.fields.integer("max_position_embeddings", 1024), draft.hidden)


def gpt_bigcode(draft: Draft) -> None:
    """GPT-2 with one KV head for all heads (`multi_query`)."""
    fields = draft.fields
    num_heads = fields.integer("num_attention_heads")
    head_dim = draft.head_dim(num_heads)
    heads = Heads(num_heads, 1 if fields.flag("multi_query", True) else num_heads, head_dim, head_dim)
    draft.attention(heads, draft.layers, bias=True, out_bias=True)
    _plain_mlp(draft, bias=True)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=True, norm_bias=True)
    draft.lookup("model.wpe", fields.integer("max_position_embeddings", 1024), draft.hidden)


def gptj(draft: Draft) -> None:
    """One norm a layer; biases in the MLP and in the head only."""
    draft.attention(draft.heads(), draft.layers)
    _plain_mlp(draft, bias=True)
    draft.norms(PRE[:1], draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True, head_bias=True)


def gpt_neox(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias", True)
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    _plain_mlp(draft, bias=True)
    draft.norms(PRE, draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True)


def opt(draft: Draft) -> None:
    """Learned positions, two more than the context; a smaller embedding (350M) comes with two projections."""
    fields = draft.fields
    bias = fields.flag("enable_bias", True)
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    _plain_mlp(draft, bias=bias)
    draft.norms(PRE, draft.layers, bias=True)
    narrow = fields.integer("word_embed_proj_dim", draft.hidden)
    has_last_norm = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm")
    draft.ends(tied=True, norm_bias=True, norm=has_last_norm)
    if narrow != draft.hidden:
        hidden, draft.hidden = draft.hidden, narrow
        draft.resize_embedding(draft.vocab)
        draft.hidden = hidden
        draft.matrix("model.project_in", hidden, narrow)
        draft.matrix("model.project_out", narrow, hidden)
    draft.lookup("model.embed_positions", fields.integer("max_position_embeddings", 2048) + 2, draft.hidden)


def bloom(draft: Draft) -> None:
    """No positions (ALiBi); one more norm behind the embedding."""
    draft.attention(draft.heads(), draft.layers, bias=True, out_bias=True)
    draft.mlp(4 * draft.hidden, draft.layers, gated=False, bias=True)
    draft.norms(PRE, draft.layers, bias=True)
    draft.norms(["word_embeddings_layernorm"], (), bias=True)
    draft.ends(tied=True, norm_bias=True)


def mpt(draft: Draft) -> None:
    """No biases, no positions."""
    section = draft.fields.section("attn_config")
    num_heads = draft.fields.integer("num_attention_heads")
    kv = num_heads if section is None else section.integer("num_key_value_heads", num_heads)
    head_dim = draft.head_dim(num_heads)
    draft.attention(draft.checked(Heads(num_heads, kv, head_dim, head_dim)), draft.layers)
    draft.mlp(draft.fields.integer("expansion_ratio", 4) * draft.hidden, draft.layers, gated=False)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=True)


def falcon(draft: Draft) -> None:
    """7B: one KV head; 40B and 180B (`new_decoder_architecture`): several, and two norms side by side."""
    fields = draft.fields
    num_heads = fields.integer("num_attention_heads")
    is_new = fields.flag("new_decoder_architecture")
    kv = 1 if fields.flag("multi_query", True) and not is_new else fields.integer("num_key_value_heads", num_heads)
    head_dim = draft.head_dim(num_heads)
    bias = fields.flag("bias")
    draft.attention(draft.checked(Heads(num_heads, kv, head_dim, head_dim)), draft.layers, bias=bias, out_bias=bias)
    draft.mlp(fields.integer("intermediate_size", 4 * draft.hidden), draft.layers, gated=False, bias=bias)
    two = is_new and fields.integer("num_ln_in_parallel_attn", 2) == 2
    two = two or not (is_new or fields.flag("parallel_attn", True))
    draft.norms(PRE if two else PRE[:1], draft.layers, bias=True)
    draft.ends(tied=True, norm_bias=True)


def phi(draft: Draft) -> None:
    """Phi-1 to Phi-2: one norm a layer, biases everywhere, also in the head."""
    draft.attention(draft.heads(), draft.layers, bias=True, out_bias=True)
    _plain_mlp(draft, bias=True)
    draft.norms(PRE[:1], draft.layers, bias=True)
    draft.ends(tied=False, norm_bias=True, head_bias=True)


def _plain_mlp(draft: Draft, *, bias: bool) -> None:
    draft.mlp(draft.fields.integer("intermediate_size", 4 * draft.hidden), draft.layers, gated=False, bias=bias)
