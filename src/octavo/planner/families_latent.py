"""Decoders that keep a latent instead of keys and values: DeepSeek-V2 to V4, Kimi, GLM-5; and sparse indexes.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
Sources: arXiv 2405.04434 (latents), 2412.19437, the DeepSeek-V3.2 report (index keys in fp8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.planner.draft import Draft
from octavo.planner.families_dense import PRE
from octavo.planner.families_moe import deepseek_experts
from octavo.planner.geometry import KVGroup


def deepseek_v3(draft: Draft) -> None:
    """V2, V3, R1, Kimi K2."""
    latent_attention(draft, draft.layers)
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def deepseek_v32(draft: Draft) -> None:
    """An indexer chooses which tokens are read; its keys are kept beside the latents. GLM-5 is the same."""
    fields = draft.fields
    latent_attention(draft, draft.layers)
    types = fields.per_layer("indexer_types", draft.num_layers)
    own = [layer for layer in draft.layers if types is None or types[layer] == "full"]
    heads, dim = fields.integer("index_n_heads", 64), fields.integer("index_head_dim", 128)
    draft.matrix("self_attn.indexer.wq_b", heads * dim, fields.integer("q_lora_rank"), own)
    draft.matrix("self_attn.indexer.wk", dim, draft.hidden, own)
    draft.norms(["self_attn.indexer.k_norm"], own, bias=True, width=dim)
    draft.matrix("self_attn.indexer.weights_proj", heads, draft.hidden, own)
    keep_index(draft, own, dim, heads)
    if len(own) < draft.num_layers:
        draft.notes.append(f"{draft.num_layers - len(own)} layers take the choice of an earlier layer's indexer")
    deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def keep_index(draft: Draft, layers: Sequence[int], dim: int, heads: int, *, tokens_per_entry: int = 1) -> None:
    if layers:
        name = "index" if tokens_per_entry == 1 else f"index-{tokens_per_entry}"
        draft.groups.append(
            KVGroup(name, "index", tuple(layers), index_dim=dim, index_heads=heads, tokens_per_entry=tokens_per_entry)
        )


def latent_attention(draft: Draft, layers: Sequence[int], *, out_gate: bool = False) -> None:
    """q (through a rank, where there is one), the latent with its rope key, and what the latent is unfolded by."""
    fields = draft.fields
    num_heads = fields.integer("num_attention_heads")
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", 64)
    nope, value = fields.integer("qk_nope_head_dim", 128), fields.integer("v_head_dim", 128)
    q_width, bias = num_heads * (nope + rope), fields.flag("attention_bias")
    if fields.has("q_lora_rank"):
        q_rank = fields.integer("q_lora_rank")
        draft.matrix("self_attn.q_a_proj", q_rank, draft.hidden, layers, bias=bias)
        draft.norms(["self_attn.q_a_layernorm"], layers, width=q_rank)
        draft.matrix("self_attn.q_b_proj", q_width, q_rank, layers)
    else:
        draft.matrix("self_attn.q_proj", q_width, draft.hidden, layers)
    draft.matrix("self_attn.kv_a_proj_with_mqa", rank + rope, draft.hidden, layers, bias=bias)
    draft.norms(["self_attn.kv_a_layernorm"], layers, width=rank)
    draft.matrix("self_attn.kv_b_proj", num_heads * (nope + value), rank, layers)
    draft.matrix("self_attn.o_proj", draft.hidden, num_heads * value, layers, bias=bias)
    if out_gate:
        draft.matrix("self_attn.g_proj", num_heads * value, draft.hidden, layers)
    chosen = fields.integer("index_topk") if fields.has("index_topk") else None
    draft.groups.append(
        KVGroup("latent", "latent", tuple(layers), num_kv_heads=1, head_dim=rank + rope, read_tokens=chosen)
    )
    draft.score_dim, draft.mix_dim = rank + rope, rank  # of absorbed attention, which reads the latent itself


def deepseek_v4(draft: Draft) -> None:
    """A window of exact tokens in every layer, and behind it entries that stand for 4 or 128 tokens each.

    One vector is K and V of all heads. The compressors keep the tokens of an unfinished entry in f32.
    """
    fields = draft.fields
    ratios = fields.numbers_per_layer("compress_ratios", draft.num_layers) or [0] * draft.num_layers
    dim, num_heads = fields.integer("head_dim"), fields.integer("num_attention_heads")
    q_rank = fields.integer("q_lora_rank")
    draft.vector("self_attn.sinks", num_heads, draft.layers)
    draft.matrix("self_attn.q_a_proj", q_rank, draft.hidden, draft.layers)
    draft.norms(["self_attn.q_a_norm"], draft.layers, width=q_rank)
    draft.matrix("self_attn.q_b_proj", num_heads * dim, q_rank, draft.layers)
    draft.matrix("self_attn.kv_proj", dim, draft.hidden, draft.layers)
    draft.norms(["self_attn.kv_norm"], draft.layers, width=dim)
    groups, rank = fields.integer("o_groups", 1), fields.integer("o_lora_rank")
    draft.matrix("self_attn.o_a_proj", groups * rank, num_heads * dim // groups, draft.layers)
    draft.matrix("self_attn.o_b_proj", draft.hidden, groups * rank, draft.layers)
    window = fields.integer("sliding_window")
    draft.groups.append(KVGroup(f"window-{window}", "latent", draft.layers, 1, dim, window=window))
    for ratio in sorted({ratio for ratio in ratios if ratio}):
        _compressed(draft, [layer for layer in draft.layers if ratios[layer] == ratio], ratio, dim)
    draft.score_dim, draft.mix_dim = dim, dim
    width = fields.integer("moe_intermediate_size")
    draft.moe(width, draft.layers, shared=width * fields.integer("n_shared_experts", 1, least=0), name="ffn")
    draft.norms(PRE, draft.layers)
    _hyper_connections(draft, fields.integer("hc_mult", 4))
    draft.ends(tied=False)


def _compressed(draft: Draft, layers: Sequence[int], ratio: int, dim: int) -> None:
    fields = draft.fields
    overlap = 2 if ratio == 4 else 1  # short entries overlap: each is made of twice its tokens
    index = fields.integer("index_head_dim", 128) if ratio == 4 else 0
    for name, width in (("compressor", dim), ("compressor.indexer", index)):
        if not width:
            continue
        draft.matrix(f"self_attn.{name}.kv_proj", overlap * width, draft.hidden, layers)
        draft.matrix(f"self_attn.{name}.gate_proj", overlap * width, draft.hidden, layers)
        draft.vector(f"self_attn.{name}.position_bias", ratio * overlap * width, layers)
        draft.norms([f"self_attn.{name}.kv_norm"], layers, width=width)
    chosen = ratio * fields.integer("index_topk") if index and fields.has("index_topk") else None
    numbers = 2 * (overlap * ratio) * (overlap * (dim + index))
    draft.groups.append(
        KVGroup(
            f"compressed-{ratio}",
            "latent",
            tuple(layers),
            1,
            dim,
            tokens_per_entry=ratio,
            read_tokens=chosen,
            state_numbers=numbers,
        )
    )
    if index:
        heads = fields.integer("index_n_heads", 64)
        draft.matrix("self_attn.compressor.indexer.q_b_proj", heads * index, fields.integer("q_lora_rank"), layers)
        draft.matrix("self_attn.compressor.indexer.weights_proj", heads, draft.hidden, layers)
        keep_index(draft, layers, index, heads, tokens_per_entry=ratio)


def _hyper_connections(draft: Draft, streams: int) -> None:
    wide, mixes = streams * draft.hidden, streams * (streams + 2)
    for name in ("attn_hc", "ffn_hc"):
        draft.matrix(f"{name}.fn", mixes, wide, draft.layers)
        draft.vector(f"{name}.base", mixes, draft.layers)
        draft.vector(f"{name}.scale", 3, draft.layers)
    draft.matrix("model.hc_head.fn", streams, wide)
    draft.vector("model.hc_head.base", streams)
    draft.vector("model.hc_head.scale", 1)


def minimax_m3(draft: Draft) -> None:
    """Ordinary heads; in most layers an indexer chooses which blocks of tokens are read."""
    fields = draft.fields
    draft.attention(draft.heads(), draft.layers, qk_norm="head")
    sparse = fields.section("sparse_attention_config")
    if sparse is not None and sparse.flag("use_sparse_attention", True):
        marks = sparse.per_layer("sparse_attention_freq", draft.num_layers) or [1] * draft.num_layers
        layers = [layer for layer in draft.layers if marks[layer]]
        dim = sparse.integer("sparse_index_dim", 128)
        draft.matrix(
            "self_attn.indexer.q_proj", sparse.integer("sparse_num_index_heads", 4) * dim, draft.hidden, layers
        )
        draft.matrix("self_attn.indexer.k_proj", dim, draft.hidden, layers)
        draft.norms(["self_attn.indexer.q_norm", "self_attn.indexer.k_norm"], layers, width=dim)
        keep_index(draft, layers, dim, sparse.integer("sparse_num_index_heads", 4))
        chosen = sparse.integer("sparse_topk_blocks", 16) * sparse.integer("sparse_block_size", 128)
        draft.groups = _reading(draft.groups, set(layers), chosen)
    deepseek_experts(draft, name="block_sparse_moe")
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def _reading(groups: list[KVGroup], layers: set[int], chosen: int) -> list[KVGroup]:
    """The groups, where those of these layers read so many tokens only: groups are cut where they differ."""
    found = []
    for group in groups:
        inside = tuple(layer for layer in group.layer_indices if layer in layers)
        outside = tuple(layer for layer in group.layer_indices if layer not in layers)
        if group.kind == "index" or not inside:
            found.append(group)
            continue
        if outside:
            found.append(replace(group, layer_indices=outside))
        found.append(replace(group, name=f"{group.name}-sparse", layer_indices=inside, read_tokens=chosen))
    return found
