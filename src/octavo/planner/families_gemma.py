"""Gemma 1 to 4 and 3n: four norms a layer, windows, heads of 256, layers that share the KV of others.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.planner.draft import Draft, Heads
from octavo.planner.families_dense import AROUND, PRE, mixed_attention
from octavo.planner.windows import layers_of_types


def gemma(draft: Draft) -> None:
    bias = draft.fields.flag("attention_bias")
    draft.attention(draft.heads(), draft.layers, bias=bias, out_bias=bias)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=True)


def gemma2(draft: Draft) -> None:
    """Every second layer, from the first on, has the window."""
    _gemma(draft, every=2, qk_norm="")


def gemma3(draft: Draft) -> None:
    """Every sixth layer sees all tokens."""
    _gemma(draft, every=6, qk_norm="head")


def _gemma(draft: Draft, every: int, qk_norm: str) -> None:
    windowed, window = layers_of_types(draft, every=every)
    bias = draft.fields.flag("attention_bias")
    mixed_attention(draft, windowed, window, bias=bias, out_bias=bias, qk_norm=qk_norm)
    draft.mlp(draft.fields.integer("intermediate_size"), draft.layers)
    draft.norms(AROUND, draft.layers)
    draft.ends(tied=True)


def gemma4(draft: Draft) -> None:
    """Full layers have heads of their own, and may take K as V; the last layers may read the KV of earlier ones."""
    fields = draft.fields
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim", 256)
    kv = fields.integer("num_key_value_heads")
    windowed, window = layers_of_types(draft, every=6)
    full = tuple(layer for layer in draft.layers if layer not in set(windowed))
    full_dim = fields.integer("global_head_dim", head_dim)
    one_for_both = fields.flag("attention_k_eq_v")
    full_kv = fields.integer("num_global_key_value_heads", kv) if one_for_both else kv
    owners = draft.num_layers - fields.integer("num_kv_shared_layers", 0, least=0)
    local = Heads(num_heads, kv, head_dim, head_dim, window, "window")
    _gemma4_attention(draft, local, windowed, owners, has_v=True)
    _gemma4_attention(draft, Heads(num_heads, full_kv, full_dim, full_dim), full, owners, has_v=not one_for_both)
    _shared_note(draft, owners)
    width = fields.integer("intermediate_size")
    wide = [layer for layer in draft.layers if layer >= owners] if fields.flag("use_double_wide_mlp") else []
    draft.mlp(width, [layer for layer in draft.layers if layer not in set(wide)])
    draft.mlp(2 * width, wide)
    draft.norms(AROUND, draft.layers)
    if fields.flag("enable_moe_block"):
        _gemma4_experts(draft)
    _inputs_per_layer(draft, fields.integer("hidden_size_per_layer_input", 0, least=0))
    draft.ends(tied=True)


def _gemma4_attention(draft: Draft, heads: Heads, layers: Sequence[int], owners: int, *, has_v: bool) -> None:
    own = [layer for layer in layers if layer < owners]
    if own:
        asked = heads if has_v else Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, 0)
        kept = list(draft.groups)
        draft.attention(draft.checked(asked), own, qk_norm="head")
        draft.groups = kept
        draft.keep(heads, own)  # K with its norm and angle, V without them: two vectors are kept either way
    _reading_attention(draft, heads, [layer for layer in layers if layer >= owners])


def _reading_attention(draft: Draft, heads: Heads, layers: Sequence[int]) -> None:
    """Layers that read another layer's K and V have a query and an output only."""
    if not layers:
        return
    width = heads.num_heads * heads.head_dim
    draft.matrix("self_attn.q_proj", width, draft.hidden, layers)
    draft.matrix("self_attn.o_proj", draft.hidden, width, layers)
    draft.norms(["self_attn.q_norm"], layers, width=heads.head_dim)


def _shared_note(draft: Draft, owners: int) -> None:
    if owners < draft.num_layers:
        draft.notes.append(f"layers {owners} to {draft.num_layers - 1} read the KV of earlier layers and hold none")


def _gemma4_experts(draft: Draft) -> None:
    fields = draft.fields
    number, used = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    width = fields.integer("moe_intermediate_size")
    draft.matrix("router.proj", number, draft.hidden, draft.layers)
    draft.vector("router.scale", draft.hidden, draft.layers)
    draft.vector("router.per_expert_scale", number, draft.layers)
    for name in ("gate_proj", "up_proj"):
        draft.experts(f"experts.*.{name}", width, draft.hidden, draft.layers, (number, used))
    draft.experts("experts.*.down_proj", draft.hidden, width, draft.layers, (number, used))
    names = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    draft.norms(names, draft.layers)


def _inputs_per_layer(draft: Draft, width: int) -> None:
    """A second embedding with a row for every layer."""
    if not width:
        return
    fields = draft.fields
    rows = fields.integer("vocab_size_per_layer_input", draft.vocab)
    draft.lookup("model.embed_tokens_per_layer", rows, draft.num_layers * width)
    draft.matrix("model.per_layer_model_projection", draft.num_layers * width, draft.hidden)
    draft.vector("model.per_layer_projection_norm.weight", width)
    draft.matrix("per_layer_input_gate", width, draft.hidden, draft.layers)
    draft.matrix("per_layer_projection", draft.hidden, width, draft.layers)
    draft.norms(["post_per_layer_input_norm"], draft.layers)


def gemma3n(draft: Draft) -> None:
    """Several residual streams (AltUp), a low-rank side path (LAuReL), inputs per layer, shared KV."""
    fields = draft.fields
    heads = draft.heads()
    windowed, window = layers_of_types(draft, every=5)
    owners = draft.num_layers - fields.integer("num_kv_shared_layers", 15, least=0)
    local = Heads(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.v_head_dim, window, "window")
    for kind in (local, heads):
        inside = kind.window is not None
        layers = [layer for layer in draft.layers if (layer in set(windowed)) == inside]
        draft.attention(kind, [layer for layer in layers if layer < owners], qk_norm="head")
        _reading_attention(draft, kind, [layer for layer in layers if layer >= owners])
    _shared_note(draft, owners)
    widths = fields.get("intermediate_size")
    if not isinstance(widths, list):
        draft.mlp(fields.integer("intermediate_size", 16384), draft.layers)
    else:
        widths = fields.per_layer("intermediate_size", draft.num_layers) or []
        for width in sorted(set(widths)):
            draft.mlp(width, [layer for layer in draft.layers if widths[layer] == width])
    draft.norms(AROUND, draft.layers)
    _altup(draft, fields.integer("altup_num_inputs", 4), fields.integer("laurel_rank", 64))
    _inputs_per_layer(draft, fields.integer("hidden_size_per_layer_input", 256))
    draft.ends(tied=True)


def _altup(draft: Draft, streams: int, rank: int) -> None:
    hidden = draft.hidden
    for index in range(streams - 1):
        draft.matrix(f"model.altup_projections.{index}", hidden, hidden)
        draft.matrix(f"model.altup_unembed_projections.{index}", hidden, hidden)
    draft.vector("altup.correct_output_scale", hidden, draft.layers)
    draft.matrix("altup.correction_coefs", streams, streams, draft.layers)
    draft.matrix("altup.prediction_coefs", streams * streams, streams, draft.layers)
    draft.matrix("altup.modality_router", streams, hidden, draft.layers)
    draft.norms(["altup.router_norm"], draft.layers)
    draft.matrix("laurel.linear_left", rank, hidden, draft.layers)
    draft.matrix("laurel.linear_right", hidden, rank, draft.layers)
    draft.norms(["laurel.post_laurel_norm"], draft.layers)
