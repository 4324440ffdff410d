"""Every architecture that can be planned, by the names that configs give it, and what their configs leave out.

A name that stands here in no table is unknown: it is refused, never guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from octavo.errors import ModelError
from octavo.planner import families_dense as dense
from octavo.planner import families_gemma as gemma
from octavo.planner import families_gpt as gpt
from octavo.planner import families_hybrid as hybrid
from octavo.planner import families_latent as latent
from octavo.planner import families_moe as moe
from octavo.planner.draft import Draft
from octavo.planner.fields import Fields

Family = Callable[[Draft], None]

FAMILIES: dict[str, Family] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "ministral": dense.mistral,
    "ministral3": dense.mistral,
    "qwen": dense.qwen,
    "qwen2": dense.qwen2,
    "qwen3": dense.qwen3,
    "phi3": dense.phi3,
    "minicpm": dense.tied_llama,
    "smollm3": dense.tied_llama,
    "ernie4_5": dense.tied_llama,
    "internlm": dense.llama,
    "internlm2": dense.llama,
    "baichuan": dense.llama,
    "granite": dense.llama,
    "helium": dense.llama,
    "yi": dense.llama,
    "mimo": dense.qwen2,
    "orion": dense.layer_norm_llama,
    "stablelm": dense.stablelm,
    "cohere": dense.cohere,
    "cohere2": dense.cohere,
    "olmo": dense.olmo,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo2,
    "exaone4": dense.exaone4,
    "glm": dense.glm,
    "glm4": dense.glm,
    "chatglm": dense.chatglm,
    "seed_oss": dense.seed_oss,
    "hunyuan_v1_dense": dense.hunyuan,
    "nemotron": dense.nemotron,
    "arcee": dense.arcee,
    "starcoder2": dense.starcoder2,
    "mllama": dense.mllama,
    "gemma": gemma.gemma,
    "gemma2": gemma.gemma2,
    "gemma3": gemma.gemma3,
    "gemma3n": gemma.gemma3n,
    "gemma4": gemma.gemma4,
    "gpt2": gpt.gpt2,
    "gpt_bigcode": gpt.gpt_bigcode,
    "gptj": gpt.gptj,
    "gpt_neox": gpt.gpt_neox,
    "opt": gpt.opt,
    "bloom": gpt.bloom,
    "mpt": gpt.mpt,
    "falcon": gpt.falcon,
    "phi": gpt.phi,
    "mixtral": moe.mixtral,
    "phimoe": moe.phimoe,
    "qwen2_moe": moe.qwen2_moe,
    "qwen3_moe": moe.qwen3_moe,
    "olmoe": moe.olmoe,
    "granitemoe": moe.granitemoe,
    "dbrx": moe.dbrx,
    "deepseek": moe.deepseek_moe,
    "glm4_moe": moe.glm4_moe,
    "gpt_oss": moe.gpt_oss,
    "llama4": moe.llama4,
    "minimax_m2": moe.minimax_m2,
    "step3p7": moe.step3p7,
    "mimo_v2_flash": moe.mimo_v2,
    "deepseek_v2": latent.deepseek_v3,
    "deepseek_v3": latent.deepseek_v3,
    "deepseek_v32": latent.deepseek_v32,
    "deepseek_v4": latent.deepseek_v4,
    "minimax_m3": latent.minimax_m3,
    "qwen3_next": hybrid.qwen3_next,
    "mamba": hybrid.mamba,
    "mamba2": hybrid.mamba2,
    "jamba": hybrid.jamba,
    "nemotron_h": hybrid.nemotron_h,
    "kimi_linear": hybrid.kimi_linear,
    "deci": hybrid.deci,
}

# Other names of the same: model_type, or the class that `architectures` names.
ALSO: dict[str, str] = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "glm_moe_dsa": "deepseek_v32",
    "qwen3_5": "qwen3_next",
    "qwen3_5_moe": "qwen3_next",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "phi-msft": "phi",
    "phi3_v": "phi3",
    "falcon_mamba": "mamba",
    "nemotron-nas": "deci",
    "mllama_text_model": "mllama",
    "chatglmmodel": "chatglm",
    "qwenlmheadmodel": "qwen",
    "glmmoedsa": "deepseek_v32",
    "gptbigcode": "gpt_bigcode",
    "gptneox": "gpt_neox",
    "gptoss": "gpt_oss",
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "nemotronh": "nemotron_h",
    "decilm": "deci",
    "minimaxm2": "minimax_m2",
    "minimaxm3": "minimax_m3",
    "kimilinear": "kimi_linear",
    "mimov2flash": "mimo_v2_flash",
    "glm4moe": "glm4_moe",
    "qwen3_5moe": "qwen3_next",
    "qwen3vl": "qwen3",
    "qwen3vlmoe": "qwen3_moe",
    "qwen2vl": "qwen2",
    "step3p7flash": "step3p7",
    "hunyuandensev1": "hunyuan_v1_dense",
    "seedoss": "seed_oss",
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "command-r": "cohere",
}

# A catalogue's own names, where a file has neither model_type nor architectures.
NAMES: dict[str, str] = {"bloom-175b": "bloom"}

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}

# What a config means where it is silent: the defaults of the classes that read these configs in transformers.
DEFAULTS: dict[str, Mapping[str, object]] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "mixtral": {"num_key_value_heads": 8, "num_experts": 8, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 128},
    "gemma": {"head_dim": 256, "vocab_size": 256000},
    "gemma2": {"vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192, "sliding_window": 4096},
    "gemma3": _GEMMA3,
    "gemma3n": {
        "vocab_size": 262400,
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "vocab_size_per_layer_input": 262144,
        "sliding_window": 512,
    },
    "gemma4": {"vocab_size": 262144, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 512},
    "falcon": {"vocab_size": 65024, "max_position_embeddings": 2048},
    "gpt2": {"vocab_size": 50257, "max_position_embeddings": 1024},
    "opt": {"vocab_size": 50272, "max_position_embeddings": 2048},
    "bloom": {"max_position_embeddings": 2048},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "llama4": {"head_dim": 128, "num_experts_per_tok": 1, "num_key_value_heads": 8},
    "seed_oss": {"head_dim": 128},
    "glm": {"head_dim": 128},
    "glm4": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256, "num_key_value_heads": 2},
    "exaone4": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "cohere2": {"sliding_window": 4096, "head_dim": 128},
    "mamba": {"vocab_size": 50280, "num_attention_heads": 1},
    "mamba2": {"vocab_size": 32768, "num_attention_heads": 128, "head_dim": 64},
    "jamba": {"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2},
}


def find_family(fields: Fields, treat_as: str | None) -> str:
    """The family's name. Raises ModelError for a name that is not known, with those that are near."""
    if treat_as is not None:
        if treat_as not in FAMILIES:
            raise ModelError(
                f"--treat-as {treat_as!r} is no family; there are {', '.join(sorted(FAMILIES))}{_near(treat_as)}"
            )
        return treat_as
    named = names_of(fields)
    for name in named:
        found = _lookup(name)
        if found is not None:
            return found
    if not named:
        raise ModelError(
            f"{fields.name} names no architecture (model_type or architectures); say which family it belongs to with "
            "--treat-as FAMILY"
        )
    raise ModelError(
        f"the architecture {named[0]!r} is not known, and it is not guessed: say which family to treat it as with "
        f"--treat-as FAMILY (such as llama), or give the numbers (--layers --kv-heads --head-dim){_near(named[0])}"
    )


def family_named(name: str) -> str | None:
    """The family of a name by which a config or a GGUF file calls its architecture; None for an unknown one."""
    return _lookup(name)


def names_of(fields: Fields) -> list[str]:
    """What the config calls itself, the most telling first."""
    found = [fields.text("model_type")] if isinstance(fields.get("model_type"), str) else []
    architectures = fields.get("architectures")
    if isinstance(architectures, list):
        found += [each for each in architectures if isinstance(each, str)]
    transformers_class = fields.get("_transformers_class")
    if isinstance(transformers_class, str):
        found.append(transformers_class)
    name = fields.get("name")
    if not found and isinstance(name, str) and name in NAMES:
        found.append(NAMES[name])
    return found


def _lookup(name: str) -> str | None:
    low = name.lower()
    for ending in ("forcausallm", "forconditionalgeneration", "lmheadmodel", "config", "_text", "_text_config", "text"):
        low = low.removesuffix(ending)
    for each in (name, name.lower(), low, low.removesuffix("_")):
        each = ALSO.get(each, each)
        if each in FAMILIES:
            return each
    return None


def _near(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), FAMILIES, n=1)
    return f"; near to it is {close[0]}" if close else ""
