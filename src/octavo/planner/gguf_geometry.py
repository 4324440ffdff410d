"""From the header of a GGUF file to a geometry: every tensor by its own shape and bytes, the cache by the metadata.

It reads no weights. What a layer is, its tensors tell; which layers have windows, the metadata or the architecture's
rule. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.models.gguf_header import KNOWN_TYPES, TensorInfo, read_header
from octavo.planner.cache_bytes import FORMATS
from octavo.planner.config_geometry import attention_name
from octavo.planner.fields import MAX_LAYERS
from octavo.planner.geometry import Geometry, KVGroup, Tensor

# architecture -> of how many layers one sees all tokens, where the metadata gives a window and no pattern (1: all
# have the window, 0: none has it)
PATTERNS: dict[str, int] = {
    **dict.fromkeys(
        (
            "llama qwen qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe gemma phi2 gpt2 gptj gptneox falcon "
            "mpt bloom starcoder stablelm command-r olmo olmo2 olmoe internlm2 minicpm baichuan orion exaone granite "
            "granitemoe chatglm glm4 glm4moe deepseek deepseek2 deepseek32 dbrx opt nemotron arcee smollm3 "
            "ernie4_5 seed_oss hunyuan-dense hunyuan-moe minimax-m2 mistral3 "
            "mamba mamba2 falcon-h1 jamba nemotron_h nemotron_h_moe granitehybrid qwen3next qwen35 qwen35moe "
            "kimi-linear deci"
        ).split(),
        0,
    ),
    **dict.fromkeys(("phi3", "starcoder2", "mistral"), 0),
    "gemma2": 2,
    "gpt-oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
    "llama4": 4,
    "gemma3n": 5,
    "gemma3": 6,
    "gemma4": 6,
}
_LAYER = re.compile(r"^blk\.(\d+)\.")
_CHUNK = 8192  # of Llama 4, whose files do not say it


def gguf_geometry(path: Path, *, treat_as: str | None = None) -> Geometry:
    """The geometry of a .gguf file, by its header alone. ModelError for a broken file or an unknown architecture."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{path} is empty; download it again")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error
    header = read_header(data, str(path), KNOWN_TYPES)
    return geometry_of_header(header.metadata, header.tensors, path.name, treat_as=treat_as)


def geometry_of_header(
    metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], model: str, *, treat_as: str | None = None
) -> Geometry:
    """The same from what stands in a header."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{model} does not say its general.architecture; it is not a language model's file")
    family = treat_as or name
    if family not in PATTERNS:
        raise ModelError(
            f"the GGUF architecture {family!r} is not known, and it is not guessed: say which one to treat it as with "
            f"--treat-as FAMILY; there are {', '.join(sorted(PATTERNS))}"
        )
    keys = _Keys(metadata, name, model)
    num_layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0)
    if not 1 <= num_layers <= MAX_LAYERS:
        raise ModelError(f"{model}: block_count is {num_layers}; it must be 1 to {MAX_LAYERS}: the file is damaged")
    found = _tensors(tensors, keys.integer("expert_used_count", 0))
    groups = _groups(keys, tensors, num_layers, PATTERNS[family])
    embedding = tensors.get("token_embd.weight")
    rank = keys.integer("attention.kv_lora_rank", 0)
    heads = max(keys.integers("attention.head_count", num_layers, 0))
    key_length = max((group.head_dim for group in groups), default=0)
    value_length = max((group.v_head_dim or group.head_dim for group in groups), default=0)
    return Geometry(
        model=model,
        architecture=name,
        family=family,
        attention=attention_name(groups, heads),
        num_layers=num_layers,
        hidden_size=keys.integer("embedding_length"),
        num_heads=heads,
        vocab_size=embedding.shape[0] if embedding else keys.integer("vocab_size", 0),
        max_context=keys.integer("context_length", 2048),
        dtype=_dtype(tensors.values()),
        groups=tuple(groups),
        tensors=tuple(found),
        score_dim=key_length,
        mix_dim=rank or value_length,
        stored_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        stored_dtype=_stored_dtype(tensors.values()),
    )


class _Keys:
    """`<architecture>.<key>`, one number or one for each layer."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, model: str) -> None:
        self._metadata = metadata
        self._architecture = architecture
        self._model = model

    def get(self, key: str) -> Any:
        value: Any = self._metadata.get(f"{self._architecture}.{key}")
        return value.tolist() if hasattr(value, "tolist") else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise ModelError(
                f"{self._model}: GGUF metadata {self._architecture}.{key} is {value!r:.60}; it must be a whole number: "
                "download or convert the file again"
            )
        return value

    def integers(self, key: str, num_layers: int, default: int) -> list[int]:
        """One for each layer."""
        value = self.get(key)
        if isinstance(value, list):
            if len(value) < num_layers or not all(type(each) is int and each >= 0 for each in value):
                raise ModelError(
                    f"{self._model}: GGUF metadata {self._architecture}.{key} has {len(value)} values for {num_layers} "
                    "layers; it must have a whole number for each"
                )
            return value[:num_layers]
        return [self.integer(key, default)] * num_layers


def _tensors(tensors: Mapping[str, TensorInfo], experts_used: int) -> list[Tensor]:
    """Each tensor of the file by itself; a third dimension counts experts."""
    has_head = "output.weight" in tensors
    found = []
    for name, info in tensors.items():
        role = "matrix" if len(info.shape) > 1 else "vector"
        if name in ("token_embd.weight", "position_embd.weight", "per_layer_token_embd.weight"):
            role = "lookup"
        plain = "model.embed_tokens.weight" if name == "token_embd.weight" else name
        plain = "lm_head.weight" if has_head and name == "output.weight" else plain
        if len(info.shape) == 3 and "_exps" in name:
            copies = info.shape[0]
            found.append(
                Tensor(
                    plain, info.shape[1:], copies=copies, used=min(copies, experts_used), stored=info.dtype, role=role
                )
            )
        else:
            found.append(Tensor(plain, info.shape, stored=info.dtype, role=role))
    return found


def _groups(keys: _Keys, tensors: Mapping[str, TensorInfo], num_layers: int, every: int) -> list[KVGroup]:
    kinds = _layer_kinds(tensors, num_layers)
    heads = keys.integers("attention.head_count", num_layers, 1)
    kv_heads = keys.integers("attention.head_count_kv", num_layers, max(heads))
    owners = num_layers - keys.integer("attention.shared_kv_layers", 0)
    windowed, window = _windows(keys, num_layers, every)
    rank = keys.integer("attention.kv_lora_rank", 0)
    hidden = keys.integer("embedding_length")
    by_shape: dict[KVGroup, list[int]] = {}
    for layer in range(min(owners, num_layers)):
        if "state" in kinds[layer]:
            by_shape.setdefault(_state(keys), []).append(layer)
        if "attention" not in kinds[layer] or not (kv_heads[layer] or rank):
            continue
        if rank:
            rope = keys.integer("rope.dimension_count", 64)
            shape = KVGroup("latent", "latent", (), 1, rank + rope)
        else:
            is_local = layer in windowed
            suffix = "_swa" if is_local and keys.get("attention.key_length_swa") is not None else ""
            k = keys.integer(f"attention.key_length{suffix}", hidden // max(1, heads[layer]))
            v = keys.integer(f"attention.value_length{suffix}", k)
            kind = "chunk" if is_local and window == _CHUNK and every == 4 else "window" if is_local else "full"
            name = f"{kind}-{window}" if is_local else "full"
            shape = KVGroup(name, kind, (), kv_heads[layer], k, v, window=window if is_local else None)
        by_shape.setdefault(shape, []).append(layer)
    return [_with_layers(shape, layers) for shape, layers in by_shape.items()]


def _with_layers(shape: KVGroup, layers: Sequence[int]) -> KVGroup:
    return replace(shape, layer_indices=tuple(layers))


def _layer_kinds(tensors: Mapping[str, TensorInfo], num_layers: int) -> list[set[str]]:
    """What each layer has, by the names of its tensors."""
    found: list[set[str]] = [set() for _ in range(num_layers)]
    for name in tensors:
        match = _LAYER.match(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        rest = name[match.end() :]
        if rest.startswith(("attn_k.", "attn_kv_a_mqa.", "attn_k_b.")):
            found[int(match[1])].add("attention")
        if rest.startswith("attn_qkv."):
            found[int(match[1])].add("fused")
        if rest.startswith(("ssm_out", "ssm_conv1d")):
            found[int(match[1])].add("state")
    for kinds in found:
        if "fused" in kinds and "state" not in kinds:  # a linear layer's fused q, k and v go into its state
            kinds.add("attention")
    return found


def _windows(keys: _Keys, num_layers: int, every: int) -> tuple[set[int], int | None]:
    window = keys.integer("attention.sliding_window", 0)
    if not window and keys.get("attention.chunk_size") is not None:
        window = keys.integer("attention.chunk_size")
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and window:
        return {layer for layer in range(num_layers) if layer < len(pattern) and pattern[layer]}, window
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        every = pattern
    if every == 4 and not window and keys.get("interleave_moe_layer_step") is not None:
        window = _CHUNK
    if not window or every == 0:
        return set(), None
    return {layer for layer in range(num_layers) if every == 1 or (layer + 1) % every}, window


def _state(keys: _Keys) -> KVGroup:
    """A Mamba or delta-net state: inner x state numbers, and the convolution's last inputs; both in f32."""
    inner, state = keys.integer("ssm.inner_size"), keys.integer("ssm.state_size")
    kernel, groups = keys.integer("ssm.conv_kernel"), keys.integer("ssm.group_count", 0)
    return KVGroup(
        "state",
        "state",
        (),
        state_numbers=inner * state + (kernel - 1) * (inner + 2 * groups * state),
    )


def _stored_dtype(tensors: Iterable[TensorInfo]) -> str:
    """What most numbers of the matrices are stored as."""
    count: dict[str, int] = {}
    for info in tensors:
        if len(info.shape) == 2:
            count[info.dtype] = count.get(info.dtype, 0) + info.shape[0] * info.shape[1]
    return max(count, key=lambda name: count[name], default="")


def _dtype(tensors: Iterable[TensorInfo]) -> str:
    """What most numbers are computed in: a file whose matrices are f32 is f32, every other one bf16 or f16."""
    count: dict[str, int] = {}
    for info in tensors:
        if len(info.shape) > 1:
            count[info.dtype] = count.get(info.dtype, 0) + info.num_bytes
    most = max(count, key=lambda name: count[name], default="f16")
    return most if most in FORMATS and most in ("f32", "f16", "bf16") else "bf16"
