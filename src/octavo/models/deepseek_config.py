"""What a DeepSeek-V2 or V3 is made of, read from a config.json or from GGUF metadata. It knows no tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from octavo.errors import ModelError
from octavo.models.config import RopeConfig, check_experts, check_number, check_sizes
from octavo.models.config_gguf import Keys, rope_of, vocab_size_of
from octavo.models.config_json import Fields, read_rope, rope_scaling
from octavo.models.experts import GroupChoice
from octavo.models.yarn import mscale_of

MODEL_TYPES = {"deepseek_v2": "DeepseekV2ForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}
GGUF_NAME = "deepseek2"
_MOST_WITHOUT_GROUPS = 64
_SIGMOID = 2  # GGUF's expert_gating_func of V3
_MAX_LATENT_DIM = 640  # the kernels' bound
_STEP = 16  # the kernels' vector


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of layers without experts
    expert_size: int  # the inner size of one expert
    num_layers: int
    num_heads: int
    q_rank: int | None  # of the queries' own low-rank form; None: they have none
    latent_rank: int
    rope_dim: int  # dimensions of a head that turn with the position
    plain_dim: int  # those that do not
    value_dim: int  # of a head of V
    num_experts: int
    num_shared: int  # experts that every row has, as one of so many times the size
    choice: GroupChoice
    first_sparse_layer: int  # from here on layers have experts
    rms_norm_eps: float
    rope: RopeConfig
    score_scale: float  # of attention scores, beyond 1 / sqrt(head size): yarn's
    max_position_embeddings: int
    routed_scale: float
    normalises: bool  # the weights of the chosen experts add up to 1 (before the scale)
    is_interleaved: bool = True  # files pair rope dimensions 2j and 2j + 1
    is_split: bool = False  # files have the matrices that make K and V apart, K's turned (newer GGUF)
    tie_word_embeddings: bool = False
    dtype: str = "f32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "expert_size", "num_layers", "num_heads")
        dims = ("latent_rank", "rope_dim", "plain_dim", "value_dim", "max_position_embeddings")
        check_sizes({name: getattr(self, name) for name in (*sizes, *dims)})
        check_sizes({"q_lora_rank": 1 if self.q_rank is None else self.q_rank, "n_shared_experts": self.num_shared + 1})
        check_experts(self.num_experts, self.choice.num_chosen)
        check_number("rms_norm_eps", self.rms_norm_eps)
        check_number("routed_scaling_factor", self.routed_scale)
        if self.latent_rank % _STEP or self.rope_dim % _STEP or self.latent_dim > _MAX_LATENT_DIM:
            raise ModelError(
                f"kv_lora_rank {self.latent_rank} with qk_rope_head_dim {self.rope_dim} is not supported; both must be "
                f"multiples of {_STEP}, together at most {_MAX_LATENT_DIM}: choose another model"
            )
        self._check_groups()

    @property
    def is_v3(self) -> bool:
        return self.architecture == "DeepseekV3ForCausalLM"

    @property
    def latent_dim(self) -> int:
        """Numbers of one token and layer in the cache."""
        return self.latent_rank + self.rope_dim

    @property
    def scale(self) -> float:
        return float((self.plain_dim + self.rope_dim) ** -0.5) * self.score_scale

    def _check_groups(self) -> None:
        choice = self.choice
        check_sizes({"n_group": choice.num_groups, "topk_group": choice.num_kept_groups})
        size, fits = self.num_experts // choice.num_groups, choice.num_kept_groups <= choice.num_groups
        if self.num_experts % choice.num_groups or not fits or size < (2 if self.is_v3 else 1):
            raise ModelError(
                f"{self.num_experts} experts cannot be in {choice.num_groups} groups of which {choice.num_kept_groups} "
                "are kept: the model's config is damaged"
            )
        if choice.num_chosen > choice.num_kept_groups * size:
            raise ModelError(
                f"num_experts_per_tok is {choice.num_chosen}, and {choice.num_kept_groups} groups of {size} experts "
                "have fewer: the model's config is damaged"
            )


def deepseek_from_json(architecture: str, fields: Fields) -> DeepseekConfig:
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    fields.refuse_other("hidden_act", "silu")
    fields.refuse_other("attention_bias", False)
    fields.refuse_other("mlp_bias", False)
    fields.refuse_other("topk_method", *(("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")))
    fields.refuse_other("scoring_func", "sigmoid" if is_v3 else "softmax")
    fields.refuse_other("moe_layer_freq", 1)
    in_groups = is_v3 or fields.text("topk_method", "greedy") == "group_limited_greedy"
    max_positions = fields.integer("max_position_embeddings", 4096 if is_v3 else 2048)
    scaling = rope_scaling(fields.data)
    kept = (fields.integer("n_group", 8 if is_v3 else 1), fields.integer("topk_group", 4 if is_v3 else 1))
    return DeepseekConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        expert_size=fields.integer("moe_intermediate_size", 2048 if is_v3 else 1407),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=fields.integer("num_attention_heads"),
        q_rank=fields.optional_integer("q_lora_rank", 1536),
        latent_rank=fields.integer("kv_lora_rank", 512),
        rope_dim=fields.integer("qk_rope_head_dim", 64),
        plain_dim=fields.integer("qk_nope_head_dim", 128),
        value_dim=fields.integer("v_head_dim", 128),
        num_experts=fields.integer("n_routed_experts", fields.integer("num_local_experts", 256 if is_v3 else 64)),
        num_shared=fields.integer("n_shared_experts", 1 if is_v3 else 2),
        choice=GroupChoice(fields.integer("num_experts_per_tok", 8), *(kept if in_groups else (1, 1))),
        first_sparse_layer=fields.integer("first_k_dense_replace", 3 if is_v3 else 0),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=read_rope(fields, max_positions, scaling),
        score_scale=_score_scale(Fields(scaling)),
        max_position_embeddings=max_positions,
        routed_scale=fields.number("routed_scaling_factor", 2.5 if is_v3 else 1.0),
        normalises=is_v3 and fields.flag("norm_topk_prob", True),  # V2 does not, whatever its config says
        is_interleaved=fields.flag("rope_interleave", True),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
    )


def deepseek_from_gguf(keys: Keys) -> DeepseekConfig:
    """V3 is told by its sigmoid. Only the Lite models have experts without groups."""
    num_experts = keys.integer("expert_count")
    if num_experts > _MOST_WITHOUT_GROUPS and "expert_group_count" not in keys:
        raise ModelError(
            f"the GGUF file has {num_experts} experts and does not say which groups they are in (expert_group_count); "
            "the model would answer differently: convert it again with a newer converter"
        )
    is_v3 = keys.integer("expert_gating_func", 1) == _SIGMOID
    q_rank, rank = keys.integer("attention.q_lora_rank", 0), keys.integer("attention.kv_lora_rank")
    rope_dim, inner = keys.integer("rope.dimension_count"), keys.integer("feed_forward_length")
    groups = keys.integer("expert_group_count", 1), keys.integer("expert_group_used_count", 1)
    rope, temperature = rope_of(keys), keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    return DeepseekConfig(
        architecture="DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM",
        vocab_size=vocab_size_of(keys),
        hidden_size=keys.integer("embedding_length"),
        intermediate_size=inner,
        expert_size=keys.integer("expert_feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=keys.integer("attention.head_count"),
        q_rank=q_rank or None,
        latent_rank=rank,
        rope_dim=rope_dim,
        plain_dim=keys.integer("attention.key_length_mla", keys.integer("attention.key_length")) - rope_dim,
        value_dim=keys.integer("attention.value_length_mla", keys.integer("attention.value_length")),
        num_experts=num_experts,
        num_shared=keys.integer("expert_shared_count", 0),
        choice=GroupChoice(keys.integer("expert_used_count"), *groups),
        first_sparse_layer=keys.integer("leading_dense_block_count", 0),
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=replace(rope, magnitude=1.0) if temperature else rope,
        score_scale=(1 + temperature * math.log(rope.factor)) ** 2 if rope.kind == "yarn" else 1.0,
        max_position_embeddings=keys.integer("context_length"),
        routed_scale=keys.number("expert_weights_scale", 1.0) or 1.0,
        normalises=is_v3 and keys.flag("expert_weights_norm", True),
        is_split="blk.0.attn_k_b.weight" in keys.shapes,
        tie_word_embeddings="output.weight" not in keys.shapes,
    )


def _score_scale(scaling: Fields) -> float:
    """Yarn's temperature, once for q and once for k."""
    all_dim = scaling.number("mscale_all_dim", 0.0)
    if scaling.data.get("rope_type", scaling.data.get("type", "default")) == "default" or not all_dim:
        return 1.0
    temperature = mscale_of(scaling.number("factor"), all_dim)
    return temperature * temperature
