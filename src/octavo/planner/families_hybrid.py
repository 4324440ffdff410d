"""Decoders in which some layers keep a state of fixed size instead of keys and values: Mamba and linear attention.

Each function describes one family: what its config says, and what it leaves unsaid. Checked against transformers.
The state of a layer is a matrix per head in f32 (unless the config says otherwise) and the last inputs of a short
convolution in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import ModelError
from octavo.planner.draft import Draft, Heads
from octavo.planner.families_dense import PRE
from octavo.planner.families_latent import latent_attention
from octavo.planner.families_moe import deepseek_experts
from octavo.planner.fields import Fields
from octavo.planner.geometry import KVGroup

MAX_MULTIPLIER = 1000.0
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _state_dtype(draft: Draft, key: str) -> str:
    return _DTYPES.get(draft.fields.text(key, "float32"), "f32")


def keep_state(draft: Draft, layers: Sequence[int], state: int, conv: int, dtype: str = "f32") -> None:
    if layers:
        draft.groups.append(
            KVGroup("state", "state", tuple(layers), state_numbers=state, conv_numbers=conv, state_dtype=dtype)
        )


def qwen3_next(draft: Draft) -> None:
    """Three of four layers are gated delta networks; attention has a gate on its output."""
    fields = draft.fields
    types = fields.per_layer("layer_types", draft.num_layers)
    every = fields.integer("full_attention_interval", 4)
    full = [
        layer
        for layer in draft.layers
        if (types[layer] == "full_attention" if types is not None else (layer + 1) % every == 0)
    ]
    linear = [layer for layer in draft.layers if layer not in set(full)]
    bias = fields.flag("attention_bias")
    draft.attention(draft.heads(), full, bias=bias, out_bias=bias, qk_norm="head", gated=True)
    _delta_net(draft, linear)
    if fields.has("num_experts"):
        dense = set(fields.layers("mlp_only_layers"))
        step = fields.integer("decoder_sparse_step", 1)
        sparse = [layer for layer in draft.layers if layer not in dense and (layer + 1) % step == 0]
        draft.moe(fields.integer("moe_intermediate_size"), sparse)
        draft.mlp(fields.integer("shared_expert_intermediate_size"), sparse, name="mlp.shared_expert")
        draft.matrix("mlp.shared_expert_gate", 1, draft.hidden, sparse)
        rest = [layer for layer in draft.layers if layer not in set(sparse)]
    else:
        rest = list(draft.layers)
    if rest:
        draft.mlp(fields.integer("intermediate_size"), rest)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def _delta_net(draft: Draft, layers: Sequence[int]) -> None:
    fields = draft.fields
    if not layers:
        return
    k_heads, v_heads = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    k_dim, v_dim = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
    kernel = fields.integer("linear_conv_kernel_dim", 4)
    mixed = 2 * k_heads * k_dim + v_heads * v_dim
    draft.matrix("linear_attn.in_proj_qkv", mixed, draft.hidden, layers)
    draft.matrix("linear_attn.in_proj_z", v_heads * v_dim, draft.hidden, layers)
    for name in ("in_proj_b", "in_proj_a"):
        draft.matrix(f"linear_attn.{name}", v_heads, draft.hidden, layers)
    draft.vector("linear_attn.conv1d.weight", mixed * kernel, layers)
    draft.vector("linear_attn.dt_bias", v_heads, layers)
    draft.vector("linear_attn.A_log", v_heads, layers)
    draft.norms(["linear_attn.norm"], layers, width=v_dim)
    draft.matrix("linear_attn.out_proj", draft.hidden, v_heads * v_dim, layers)
    dtype = _state_dtype(draft, "mamba_ssm_dtype")
    keep_state(draft, layers, v_heads * k_dim * v_dim, mixed * (kernel - 1), dtype)


def _mamba1(draft: Draft, layers: Sequence[int], *, norms: bool, name: str = "mamba") -> None:
    fields = draft.fields
    inner = fields.integer("mamba_expand", fields.integer("expand", 2)) * draft.hidden
    state = fields.integer("mamba_d_state", fields.integer("state_size", 16))
    kernel = fields.integer("mamba_d_conv", fields.integer("conv_kernel", 4))
    given = fields.get("mamba_dt_rank") or fields.get("time_step_rank")
    rank = given if isinstance(given, int) else -(-draft.hidden // 16)
    bias = fields.flag("mamba_proj_bias", fields.flag("use_bias"))
    draft.matrix(f"{name}.in_proj", 2 * inner, draft.hidden, layers, bias=bias)
    draft.vector(f"{name}.conv1d.weight", inner * kernel, layers)
    if fields.flag("mamba_conv_bias", fields.flag("use_conv_bias", True)):
        draft.vector(f"{name}.conv1d.bias", inner, layers)
    draft.matrix(f"{name}.x_proj", rank + 2 * state, inner, layers)
    draft.matrix(f"{name}.dt_proj", inner, rank, layers, bias=True)
    draft.vector(f"{name}.A_log", inner * state, layers)
    draft.vector(f"{name}.D", inner, layers)
    draft.matrix(f"{name}.out_proj", draft.hidden, inner, layers, bias=bias)
    if norms:
        for each, width in (("dt_layernorm", rank), ("b_layernorm", state), ("c_layernorm", state)):
            draft.vector(f"{name}.{each}.weight", width, layers)
    keep_state(draft, layers, inner * state, inner * (kernel - 1))


def _mamba2(draft: Draft, layers: Sequence[int], sizes: tuple[int, int, int, int, int], name: str = "mixer") -> None:
    """sizes: heads, numbers of a head, groups, numbers of a state, length of the convolution."""
    heads, head_dim, groups, state, kernel = sizes
    fields = draft.fields
    inner = heads * head_dim
    mixed = inner + 2 * groups * state
    bias = fields.flag("mamba_proj_bias", fields.flag("use_bias"))
    draft.matrix(f"{name}.in_proj", inner + mixed + heads, draft.hidden, layers, bias=bias)
    draft.vector(f"{name}.conv1d.weight", mixed * kernel, layers)
    if fields.flag("use_conv_bias", fields.flag("mamba_conv_bias", True)):
        draft.vector(f"{name}.conv1d.bias", mixed, layers)
    for each in ("dt_bias", "A_log", "D"):
        draft.vector(f"{name}.{each}", heads, layers)
    draft.norms([f"{name}.norm"], layers, width=inner)
    draft.matrix(f"{name}.out_proj", draft.hidden, inner, layers, bias=bias)
    keep_state(draft, layers, inner * state, mixed * (kernel - 1), _state_dtype(draft, "mamba_ssm_cache_dtype"))


def mamba(draft: Draft) -> None:
    _mamba1(draft, draft.layers, norms=False, name="mixer")
    draft.norms(["norm"], draft.layers)
    draft.ends(tied=True)


def mamba2(draft: Draft) -> None:
    fields = draft.fields
    heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    sizes = (
        heads,
        head_dim,
        fields.integer("n_groups", 8),
        fields.integer("state_size", 128),
        fields.integer("conv_kernel", 4),
    )
    _mamba2(draft, draft.layers, sizes)
    draft.norms(["norm"], draft.layers)
    draft.ends(tied=False)


def jamba(draft: Draft) -> None:
    """Attention in one layer of `attn_layer_period`, experts in one of `expert_layer_period`."""
    fields = draft.fields
    period, offset = fields.integer("attn_layer_period", 8), fields.integer("attn_layer_offset", 4, least=0)
    full = [layer for layer in draft.layers if layer % period == offset]
    draft.attention(draft.heads(), full)
    _mamba1(draft, [layer for layer in draft.layers if layer not in set(full)], norms=True)
    period, offset = fields.integer("expert_layer_period", 2), fields.integer("expert_layer_offset", 1, least=0)
    many = fields.integer("num_experts", 16) > 1
    sparse = [layer for layer in draft.layers if many and layer % period == offset]
    width = fields.integer("intermediate_size")
    draft.moe(width, sparse, name="feed_forward")
    draft.mlp(width, [layer for layer in draft.layers if layer not in set(sparse)], name="feed_forward")
    draft.norms(("input_layernorm", "pre_ff_layernorm"), draft.layers)
    draft.ends(tied=False)


def nemotron_h(draft: Draft) -> None:
    """A pattern of letters: M a Mamba 2 layer, * attention, - an MLP, E experts; one norm a layer."""
    fields = draft.fields
    letters = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
    named = fields.sequence("layers_block_type")
    pattern = (
        "".join(letters.get(str(each), "?") for each in named) if named else fields.text("hybrid_override_pattern")
    )
    if len(pattern) != draft.num_layers or set(pattern) - set("M*-E"):
        raise ModelError(
            f"{fields.name}: hybrid_override_pattern {pattern!r} must have one of M, *, - and E for each of "
            f"{draft.num_layers} layers"
        )
    of = {letter: [layer for layer in draft.layers if pattern[layer] == letter] for letter in "M*-E"}
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("attention_head_dim", 128))
    heads = Heads(num_heads, fields.integer("num_key_value_heads", num_heads), head_dim, head_dim)
    draft.attention(draft.checked(heads), of["*"], name="mixer", bias=fields.flag("attention_bias"))
    sizes = (
        fields.integer("mamba_num_heads"),
        fields.integer("mamba_head_dim", 64),
        fields.integer("n_groups", 8),
        fields.integer("ssm_state_size", 128),
        fields.integer("conv_kernel", 4),
    )
    if of["M"]:
        _mamba2(draft, of["M"], sizes)
    draft.mlp(fields.integer("intermediate_size", 1), of["-"], gated=False, name="mixer")
    if of["E"]:
        _nemotron_experts(draft, of["E"])
    draft.norms(["norm"], draft.layers)
    draft.ends(tied=False)


def _nemotron_experts(draft: Draft, layers: Sequence[int]) -> None:
    """Experts without a gate, perhaps on a latent of the hidden state."""
    fields = draft.fields
    latent = fields.integer("moe_latent_size", 0, least=0)
    draft.moe(fields.integer("moe_intermediate_size"), layers, name="mixer", gated=False, hidden=latent)
    shared = fields.integer("moe_shared_expert_intermediate_size", 0, least=0)
    if shared:
        width = shared * fields.integer("n_shared_experts", 1)
        draft.mlp(width, layers, gated=False, name="mixer.shared_experts")
    if latent:
        draft.matrix("mixer.fc1_latent_proj", latent, draft.hidden, layers)
        draft.matrix("mixer.fc2_latent_proj", draft.hidden, latent, layers)


def kimi_linear(draft: Draft) -> None:
    """Kimi delta attention in most layers, latents in the others. Layers are counted from one in its config."""
    fields = draft.fields
    linear = fields.section("linear_attn_config")
    if linear is None:
        raise ModelError(f"{fields.name} has no linear_attn_config; it is not complete: download it again")
    full = [layer - 1 for layer in linear.layers("full_attn_layers")]
    delta = [layer for layer in draft.layers if layer not in set(full)]
    latent_attention(draft, full, out_gate=fields.flag("mla_use_output_gate"))
    _kimi_delta(draft, delta, linear.integer("num_attention_heads"), linear.integer("head_dim"))
    if fields.has("routed_expert_hidden_size"):
        _kimi_latent_experts(draft)
    else:
        deepseek_experts(draft)
    draft.norms(PRE, draft.layers)
    draft.ends(tied=False)


def _kimi_delta(draft: Draft, layers: Sequence[int], heads: int, dim: int) -> None:
    linear = draft.fields.section("linear_attn_config")
    assert linear is not None
    kernel, width = linear.integer("short_conv_kernel_size", 4), heads * dim
    for name in ("q_proj", "k_proj", "v_proj"):
        draft.matrix(f"self_attn.{name}", width, draft.hidden, layers)
    draft.vector("self_attn.conv1d.weight", 3 * width * kernel, layers)
    draft.vector("self_attn.dt_bias", width, layers)
    draft.vector("self_attn.A_log", heads, layers)
    draft.matrix("self_attn.f_a_proj", dim, draft.hidden, layers)
    draft.matrix("self_attn.f_b_proj", width, dim, layers)
    draft.matrix("self_attn.b_proj", heads, draft.hidden, layers)
    if linear.flag("use_full_rank_gate"):
        draft.matrix("self_attn.g_proj", width, draft.hidden, layers)
    else:
        draft.matrix("self_attn.g_a_proj", dim, draft.hidden, layers)
        draft.matrix("self_attn.g_b_proj", width, dim, layers)
    draft.norms(["self_attn.o_norm"], layers, width=dim)
    draft.matrix("self_attn.o_proj", draft.hidden, width, layers)
    keep_state(draft, layers, heads * dim * dim, 3 * width * (kernel - 1))


def _kimi_latent_experts(draft: Draft) -> None:
    """Kimi K3: experts on a narrower vector. Which norms stand around it, no config says."""
    fields = draft.fields
    first = fields.integer("first_k_dense_replace", 0, least=0)
    sparse = [layer for layer in draft.layers if layer >= first]
    narrow, width = fields.integer("routed_expert_hidden_size"), fields.integer("moe_intermediate_size")
    draft.moe(width, sparse, shared=width * fields.integer("n_shared_experts", 0, least=0), hidden=narrow)
    draft.matrix("mlp.routed_down_proj", narrow, draft.hidden, sparse)
    draft.matrix("mlp.routed_up_proj", draft.hidden, narrow, sparse)
    draft.mlp(fields.integer("intermediate_size"), [layer for layer in draft.layers if layer < first])
    draft.exact = False
    draft.notes.append("parameters: small norms that this config does not describe are not counted")


def deci(draft: Draft) -> None:
    """Llama-Nemotron: each layer has its own number of KV heads, or no attention, and an MLP of its own width."""
    fields = draft.fields
    blocks = fields.per_layer("block_configs", draft.num_layers) or []
    num_heads = fields.integer("num_attention_heads")
    head_dim = draft.head_dim(num_heads)
    by_kv: dict[int, list[int]] = {}
    by_width: dict[int, list[int]] = {}
    linear: list[int] = []
    for layer, block in enumerate(blocks):
        section = Fields({"block": block}, f"{fields.name}: block_configs").section("block")
        attention = section.section("attention") if section is not None else None
        ffn = section.section("ffn") if section is not None else None
        if attention is not None and attention.has("n_heads_in_group"):
            by_kv.setdefault(num_heads // attention.integer("n_heads_in_group"), []).append(layer)
        elif attention is not None and attention.flag("replace_with_linear"):
            linear.append(layer)
        multiplier = ffn.number("ffn_mult", 0.0) if ffn is not None else 0.0
        if 0 < multiplier < MAX_MULTIPLIER:
            wanted = int(2 * multiplier * draft.hidden / 3)
            by_width.setdefault(-(-wanted // 256) * 256, []).append(layer)
    for kv, layers in sorted(by_kv.items()):
        draft.attention(draft.checked(Heads(num_heads, kv, head_dim, head_dim)), layers)
        draft.norms(PRE[:1], layers)
    if linear:
        draft.matrix("self_attn.linear_attn", draft.hidden, draft.hidden, linear)
    for width, layers in sorted(by_width.items()):
        draft.mlp(width, layers)
        draft.norms(PRE[1:], layers)
    draft.ends(tied=False)
