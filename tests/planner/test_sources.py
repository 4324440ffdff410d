"""References to geometries: GGUF headers, the hub's small files, lengths of requests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

from octavo.errors import ConfigError, DownloadError, ModelError
from octavo.models.aliases import ALIASES
from octavo.planner.gguf_geometry import gguf_geometry
from octavo.planner.known_models import known_config, known_names
from octavo.planner.lengths import read_lengths
from octavo.planner.sources import open_geometry
from tests.models.tiny_gguf import make_tiny_gguf
from tests.models.tiny_models import make_tiny_model


def write_gguf(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    for name, shape in tensors.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


BASE = {"embedding_length": 32, "context_length": 100, "attention.head_count": 4, "attention.head_count_kv": 2}
ENDS = {"token_embd.weight": (50, 32), "output_norm.weight": (32,)}


def attention(layer: int) -> dict[str, tuple[int, ...]]:
    return {f"blk.{layer}.attn_q.weight": (32, 32), f"blk.{layer}.attn_k.weight": (16, 32)}


def test_a_gguf_file_is_counted_by_its_own_tensors(tmp_path: Path) -> None:
    weights = make_tiny_gguf(tmp_path / "m.gguf", "llama2", "Q8_0")
    found = open_geometry(str(tmp_path / "m.gguf"))
    assert found.parameters == sum(values.size for values in weights.values())
    assert found.stored_bytes is not None
    assert found.stored_bytes < 2 * found.parameters
    (group,) = found.groups
    assert (group.num_layers, group.num_kv_heads, group.head_dim) == (2, 8, 16)


def test_windows_of_a_gguf_file_follow_the_architecture(tmp_path: Path) -> None:
    tensors = {**ENDS, **{name: shape for layer in range(6) for name, shape in attention(layer).items()}}
    keys = {**BASE, "block_count": 6, "attention.sliding_window": 16, "attention.key_length": 24}
    keys["attention.value_length"] = 8
    found = {
        group.name: group for group in gguf_geometry(write_gguf(tmp_path / "g.gguf", "gemma3", keys, tensors)).groups
    }
    assert found["full"].layer_indices == (5,)
    assert found["window-16"].num_layers == 5
    assert (found["full"].head_dim, found["full"].v_head_dim) == (24, 8)


def test_a_latent_and_experts_of_a_gguf_file(tmp_path: Path) -> None:
    tensors = {**ENDS, "blk.0.attn_kv_a_mqa.weight": (24, 32), "blk.0.ffn_up_exps.weight": (4, 16, 32)}
    keys = {**BASE, "block_count": 1, "attention.kv_lora_rank": 16, "rope.dimension_count": 8}
    keys |= {"expert_count": 4, "expert_used_count": 2}
    found = gguf_geometry(write_gguf(tmp_path / "d.gguf", "deepseek2", keys, tensors))
    assert [(group.kind, group.numbers_per_entry) for group in found.groups] == [("latent", 24)]
    assert found.parameters - found.active_parameters == 2 * 16 * 32


def test_states_and_heads_per_layer_of_a_gguf_file(tmp_path: Path) -> None:
    tensors = {**ENDS, **attention(1), "blk.0.ssm_conv1d.weight": (64, 4), "blk.0.ssm_out.weight": (32, 64)}
    keys = {**BASE, "block_count": 2, "attention.head_count_kv": [0, 1], "ssm.inner_size": 64}
    keys |= {"ssm.state_size": 8, "ssm.conv_kernel": 4, "ssm.group_count": 1}
    found = {
        group.kind: group for group in gguf_geometry(write_gguf(tmp_path / "j.gguf", "jamba", keys, tensors)).groups
    }
    assert found["state"].layer_indices == (0,)
    assert found["state"].state_numbers == 64 * 8 + 3 * (64 + 2 * 8)
    assert (found["full"].layer_indices, found["full"].num_kv_heads) == ((1,), 1)


def test_unknown_gguf_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "martian", {**BASE, "block_count": 1}, {**ENDS, **attention(0)})
    with pytest.raises(ModelError, match="treat-as"):
        gguf_geometry(path)
    assert gguf_geometry(path, treat_as="llama").num_layers == 1


def test_damaged_gguf_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="empty"):
        open_geometry(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(ModelError, match="cannot be used"):
        open_geometry(str(tmp_path / "m.gguf"))
    path = write_gguf(tmp_path / "n.gguf", "llama", {**BASE, "block_count": 1 << 20}, {**ENDS, **attention(0)})
    with pytest.raises(ModelError, match="block_count"):
        open_geometry(str(path))


def test_short_names_can_be_read_and_name_the_aliases() -> None:
    for name in known_names():
        assert open_geometry(name).parameters > 10**8
    assert {alias.name for alias in ALIASES} <= set(known_names())
    assert known_config("no-such-model") is None


def test_the_alias_is_the_real_file(smollm2_path: Path) -> None:
    by_name, by_file = open_geometry("smollm2"), open_geometry(str(smollm2_path))
    assert by_name.parameters == by_file.parameters
    assert by_name.groups == by_file.groups


def test_a_directory_is_counted_by_its_files(tmp_path: Path) -> None:
    """The files decide over the config: what they store, and how many bytes they have."""
    make_tiny_model(tmp_path / "one", dtype="bf16")
    make_tiny_model(tmp_path / "many", dtype="f16", num_shards=3)
    one, many = open_geometry(str(tmp_path / "one")), open_geometry(str(tmp_path / "many"))
    assert one.stored_bytes == many.stored_bytes == 2 * one.parameters
    assert (one.dtype, many.dtype) == ("bf16", "f16")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    assert open_geometry(str(tmp_path / "one")).dtype == "bf16"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (8).to_bytes(8, "little") + b'{"a":1}\n',
        (60).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}'.ljust(60),
    ],
)
def test_damaged_headers_are_refused(data: bytes, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        open_geometry(str(tmp_path))


def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: dict[str, object], stored: object) -> None:
    def download(repository: str, name: str) -> str:
        if name not in files:
            raise EntryNotFoundError(name)
        (folder / name).write_text(json.dumps(files[name]))
        return str(folder / name)

    class Metadata:
        parameter_count = stored

    def metadata(repository: str) -> Metadata:
        if stored is None:
            raise NotASafetensorsRepoError(repository)
        return Metadata()

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)


CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CONFIG |= {"vocab_size": 100, "intermediate_size": 128, "torch_dtype": "bfloat16"}


def test_a_hub_id_is_planned_from_its_small_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, {"config.json": CONFIG}, {"BF16": 1000, "F8_E4M3": 50})
    found = open_geometry("org/name")
    assert found.model == "org/name"
    assert found.stored_bytes == 2050
    hub(monkeypatch, tmp_path, {"config.json": CONFIG}, None)
    assert open_geometry("org/name").stored_bytes is None
    companion = {"quantization": {"quant_algo": "FP8"}}
    hub(monkeypatch, tmp_path, {"config.json": CONFIG, "hf_quant_config.json": companion}, None)
    assert open_geometry("org/name").quantisation is not None


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(monkeypatch, tmp_path, {}, None)
    with pytest.raises(DownloadError, match=r"org/name:config\.json"):
        open_geometry("org/name")


@pytest.mark.parametrize(
    ("text", "totals"),
    [
        ("num_prefill_tokens,num_decode_tokens,num_total_tokens\n3,4,7\n5,5,10\n", (7, 10)),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nx,3,4\n", (7,)),
        ("tokens\n12\n\n7\n", (12, 7)),
        ("12\n7\n", (12, 7)),
    ],
)
def test_lengths_of_several_schemas(text: str, totals: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(text)
    assert read_lengths(tmp_path / "l.csv").totals == totals
    (tmp_path / "l.csv.gz").write_bytes(gzip.compress(text.encode()))
    assert read_lengths(tmp_path / "l.csv.gz").totals == totals


def test_percentiles() -> None:
    from octavo.planner.lengths import Lengths

    lengths = Lengths(tuple(range(1, 101)))
    assert [lengths.percentile(percent) for percent in (0, 50, 95, 100)] == [1, 50, 95, 100]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "prompt_tokens,completion_tokens\nx,y\n", "tokens\n"])
def test_files_without_lengths_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(ConfigError, match="--lengths"):
        read_lengths(tmp_path / "l.csv")
    (tmp_path / "l.csv.gz").write_bytes(b"\x1f\x8bnot gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "l.csv.gz")
