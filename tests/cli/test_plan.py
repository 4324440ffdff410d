"""`octavo plan`: its forms, its errors, and how little it loads."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from octavo.cli.main import octavo, run
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVSpec

KEYS = (
    "model attention parameters weights_bytes kv_bytes_per_token kv_bytes_per_block kv_groups kv_bytes context batch "
    "crossover_tokens memory_bytes num_blocks max_tokens max_sequences bytes_read_per_token"
).split()


def planned(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(octavo, ["plan", *arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["plan", *arguments]) in (1, 2)
    return capsys.readouterr().err


def test_json_has_every_key() -> None:
    found = planned("llama-2-7b", "--memory", "24GB")
    assert set(KEYS) <= set(found)
    assert all(found[key] is not None for key in KEYS)
    assert found["kv_groups"][0]["name"] == "full"


def test_without_memory_what_fits_is_not_known() -> None:
    found = planned("llama-2-7b")
    assert [found[key] for key in ("memory_bytes", "num_blocks", "max_tokens", "max_sequences")] == [None] * 4


def test_context_and_batch_multiply() -> None:
    one = planned("llama-2-7b", "--context", "1000")
    many = planned("llama-2-7b", "--context", "1000", "--batch", "7")
    assert many["kv_bytes"] == 7 * one["kv_bytes"] == 7 * 1000 * 524288


def test_plain_numbers() -> None:
    found = planned("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--kv-cache-dtype", "fp8")
    assert (found["kv_bytes_per_token"], found["weights_bytes"], found["attention"]) == (65536, None, "MHA")
    assert found["exact"] is True
    assert found["notes"] == ["no --parameters: weights, crossover and speed are not known"]
    found = planned("--layers", "2", "--kv-heads", "1", "--head-dim", "16", "--heads", "4", "--window", "100")
    assert (found["attention"], found["kv_bytes"]) == ("MQA + window", 100 * 2 * 2 * 16 * 2)


def test_a_directory_a_config_and_a_companion(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "intermediate_size": 128, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = planned(str(tmp_path))
    assert whole["model"] == tmp_path.name
    assert planned(str(tmp_path / "config.json"))["parameters"] == whole["parameters"]
    quantised = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quantised))
    smaller = planned(str(tmp_path), "--engine", "vllm")
    assert smaller["weights_bytes"] < whole["weights_bytes"] * 0.8
    assert smaller["kv_cache_dtype"] == "fp8"


def test_csv_has_the_same_figures() -> None:
    done = CliRunner().invoke(octavo, ["plan", "llama-2-7b", "--csv"], catch_exceptions=False)
    rows = {row["figure"]: row["value"] for row in csv.DictReader(io.StringIO(done.output))}
    found = planned("llama-2-7b")
    for key in KEYS:
        if key != "kv_groups":
            assert rows[key] == ("" if found[key] is None else str(found[key]))
    assert rows["kv_groups.full.bytes_per_token"] == "524288"
    assert rows["by_context.0.context"] == "4096"


def test_every_figure_can_show_its_formula() -> None:
    done = CliRunner().invoke(octavo, ["plan", "llama-2-7b", "--memory", "24GB", "--explain"], catch_exceptions=False)
    assert "2 (K and V) x 32 layers x 32 KV heads x 128 x 2 bytes = 524288" in done.output
    lines = done.output.split("\nGroups")[0].strip().splitlines()
    assert all(line.startswith(" ") for line in lines[1::2])
    assert not any(line.startswith(" ") for line in lines[::2])


def test_formulas_come_with_json_too() -> None:
    found = planned("llama-2-7b", "--explain")
    assert found["formulas"]["kv_bytes_per_token"].endswith("= 524288")
    assert set(found["formulas"]) <= set(found)
    assert "formulas" not in planned("llama-2-7b")


def test_layers_can_be_left_out_of_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes of a token, and of blocks, as the engine would have them."""
    found = planned("smollm2", "--kv-cache-dtype", "int8", "--kv-cache-dtype-skip-layers", "0-1,29")
    groups = build_groups([LayerGeometry(3, 64, "bf16" if index in (0, 1, 29) else "int8") for index in range(30)])
    spec = KVSpec(groups, 16)
    assert found["kv_bytes_per_token"] == spec.bytes_per_token
    assert found["kv_bytes_per_block"] == spec.bytes_per_block
    assert {(group["kv_format"], group["num_layers"]) for group in found["kv_groups"]} == {("bf16", 3), ("int8", 27)}
    told = refused(capsys, "smollm2", "--kv-cache-dtype-skip-layers", "30")
    assert "names layer 30; this model's layers go from 0 to 29" in told


def test_the_context_has_the_name_that_other_engines_give_it() -> None:
    assert planned("llama-2-7b", "--max-model-len", "777")["context"] == 777


def test_all_tables_are_shown() -> None:
    from octavo.planner.tables import TITLES

    arguments = ["plan", "llama-2-7b", "--gpu", "A100-80GB", "--all"]
    done = CliRunner().invoke(octavo, arguments, catch_exceptions=False)
    for name, title in TITLES.items():
        assert (title in done.output) == (name != "lengths"), title


def test_the_catalogue_names_its_sources() -> None:
    done = CliRunner().invoke(octavo, ["plan", "--list-hardware"], catch_exceptions=False)
    assert "A100-40GB" in done.output
    assert "datasheet" in done.output


def test_lengths_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("prompt_tokens,completion_tokens\n100,50\n200,10\n10,4\n")
    found = planned("llama-2-7b", "--lengths", str(file), "--kv-cache-memory", "1GiB")
    assert found["lengths"]["longest_tokens"] == 210
    assert found["lengths"]["median_tokens"] == 150
    blocks = (10 + 14 + 1) / 3
    assert found["lengths"]["concurrent_sequences"] == pytest.approx(128 / blocks)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-of-that-name"], ("no hub id", "llama-2-7b")),
        (["llama-2-7"], ("did you mean llama-2-7b",)),
        (["absent/config.json"], ("no file",)),
        ([], ("MODEL", "--layers")),
        (["llama-2-7b", "--layers", "3"], ("either MODEL",)),
        (["--layers", "3"], ("--kv-heads", "missing")),
        (["llama-2-7b", "--gpu", "A100"], ("A100-40GB", "--list-hardware")),
        (["llama-2-7b", "--gpu", "A100-40GB", "--memory", "1GB"], ("give one",)),
        (["llama-2-7b", "--memory", "much"], ("512MiB",)),
        (["llama-2-7b", "--kv-cache-dtype", "int3"], ("int3", "bf16")),
        (["llama-2-7b", "--engine", "magic"], ("magic", "sglang")),
        (["llama-2-7b", "--context", "0"], ("context",)),
        (["llama-2-7b", "--gpu-memory-utilization", "1.5"], ("1.5", "at most 1")),
        (["llama-2-7b", "--lengths", "absent.csv"], ("absent.csv", "CSV")),
        (["llama-2-7b", "--json", "--csv"], ("exclude",)),
        (["llama-2-7b", "--tensor-parallel-size", "0"], ("tensor-parallel-size", "1")),
    ],
)
def test_errors_name_value_and_cure(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, *arguments)
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def test_what_does_not_fit_is_an_answer_with_its_arithmetic() -> None:
    found = planned("llama-2-7b", "--memory", "1GiB")
    assert [found[key] for key in ("kv_memory_bytes", "num_blocks", "max_tokens", "max_sequences")] == [0] * 4
    assert "13477363712 of weights" in found["notes"][-1]
    found = planned("llama-2-7b", "--kv-cache-memory", "1MB")
    assert found["num_blocks"] == 0
    assert "needs 2147483648 bytes" in found["notes"][-1]


def test_unknown_architectures_need_treat_as(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "martian", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config |= {"vocab_size": 100, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "--treat-as" in refused(capsys, str(tmp_path))
    assert planned(str(tmp_path), "--treat-as", "llama")["family"] == "llama"


def test_the_plain_case_loads_neither_numpy_nor_kernels() -> None:
    code = (
        "import sys; from octavo.cli.main import run; run(['plan', 'llama-2-7b', '--json', '--gpu', 'H100-80GB']); "
        "heavy = ('numpy', 'rich', 'gguf', 'tokenizers', 'starlette', 'huggingface_hub', 'octavo.kernels', 'asyncio'); "
        "print(sorted(name for name in sys.modules if name.startswith(heavy)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
