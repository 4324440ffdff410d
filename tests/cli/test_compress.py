"""`octavo compress`: what it prints, what it measures, what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import compress, compress_measure
from octavo.cli.text_file import read_text
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.executor.certificate import FILE_KIND, write_certificate
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model, open_model
from octavo.planner.compression_advice import SCENARIOS as advised
from tests.cli.conftest import CommandLine
from tests.models.tiny_models import make_tiny_model

FOX = "The quick brown fox jumps over the lazy dog. "


def made(command_line: CommandLine, *arguments: object) -> dict[str, Any]:
    ended = command_line("compress", *arguments, "--json")
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_tables(command_line: CommandLine) -> None:
    ended = command_line("compress", "llama-3.1-8b", "--context", "32K", "--memory", "24GiB", "--requests", "4")
    assert ended.code == 0, ended.err
    assert "llama-3.1-8b: GQA, 32,768 tokens a request" in ended.out
    for title in ("Fewer heads", "Fewer bits", "Fewer tokens", "Together", "Recommended, for 4 at once"):
        assert f"\n{title}" in ended.out
    assert "  agents: --kv-cache-dtype int8: 2.031 GiB a request, 4 fit" in ended.out
    assert "Measured for this model: nothing" in ended.out


def test_json(command_line: CommandLine) -> None:
    found = made(command_line, "smollm2", "--context", "8192", "--memory", "1GiB", "--scenario", "chat")
    assert (found["context"], found["kv_cache_dtype"], found["block_size"]) == (8192, "bf16", 16)
    assert found["rows"][0]["kv_bytes"] == 8192 * 23_040
    assert [one["scenario"] for one in found["recommendations"]] == ["chat"]
    assert {one["kind"] for one in found["evidence"]} == {"stored", "published"}
    assert made(command_line, "smollm2", "--context", "8k", "--memory", "1GiB", "--scenario", "chat") == found


def test_a_device_and_the_bytes_of_a_cache(command_line: CommandLine) -> None:
    device = made(command_line, "llama-3.1-8b", "--context", "4K", "--hardware", "H100")
    assert device["kv_budget_bytes"] == int(80 * 10**9 * 0.95) - device["weights_bytes"]
    cache = made(command_line, "llama-3.1-8b", "--context", "4K", "--kv-cache-memory", "1GiB")
    assert cache["kv_budget_bytes"] == 2**30
    assert cache["rows"][0]["requests"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nosuch", "--context", "1K", "--memory", "1GiB"), 1, "'nosuch' is no directory"),
        (("smollm2", "--context", "0", "--memory", "1GiB"), 2, "'0' is no number of tokens from 1"),
        (("smollm2", "--context", "a lot", "--memory", "1GiB"), 2, "write 32K"),
        (("smollm2", "--context", "1K", "--memory", "10MiB"), 1, "leaves nothing of 10485760 bytes"),
        (("smollm2", "--context", "8K", "--kv-cache-memory", "4096"), 1, "no way to keep 8192 tokens fits"),
        (("smollm2", "--context", "1K"), 2, "nothing says how much memory there is"),
        (("smollm2", "--memory", "1GiB", "--hardware", "H100"), 2, "in different ways"),
        (("smollm2", "--memory", "1GiB", "--scenario", "poetry"), 2, "poetry"),
        (("smollm2", "--memory", "1GiB", "--requests", "0"), 2, "0 is not in the range"),
        (("smollm2", "--memory", "1GiB", "--text", __file__), 2, "--text is what --measure reads"),
        (("smollm2", "--memory", "1GiB", "--kv-cache-dtype", "int3"), 1, "int3"),
    ],
)
def test_what_cannot_be_is_told(arguments: tuple[str, ...], code: int, words: str, command_line: CommandLine) -> None:
    ended = command_line("compress", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
    assert "Traceback" not in ended.err


def test_measure(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    text = tmp_path / "text.txt"
    text.write_text(FOX * 20)
    arguments = (tiny_model, "--context", "64", "--kv-cache-memory", "1MiB", "--measure", "--text", text)
    found = made(command_line, *arguments, "--text-tokens", "40")
    by_name = {one["kv_format"]: one for one in found["measured"]}
    assert set(by_name) | {"f32"} >= set(FORMAT_BYTES) - {"k8v4", "int4"}
    assert 0 <= by_name["f16"]["kl_mean"] < by_name["fp8_e5m2"]["kl_mean"]
    assert by_name["bf16"]["source"] == "measured now"
    assert any("40 tokens as one request, weights in f32" in note for note in found["notes"])
    row = next(one for one in found["rows"] if one["ways"] == ["bits"] and one["kv_cache_dtype"] == "int8")
    assert row["kl_mean"] == by_name["int8"]["kl_mean"]
    packed = tmp_path / "text.txt.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    assert made(command_line, *arguments[:-1], packed, "--text-tokens", "40") == found


def test_a_text_of_any_length_is_measured_in_requests_of_one_size(tiny_model: Path) -> None:
    """So that neither logits nor caches grow with it; each request begins with an empty cache."""
    model = load_model(open_model(tiny_model), NativeOps(1), "f32")
    token_ids = [(7 * at * at + 3 * at) % 300 + 3 for at in range(100)]
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compress_measure, "PIECE_TOKENS", 40)
        cut = {one.kv_format: one for one in compress_measure.measure_formats(model, token_ids, notes)}
    parts = [token_ids[:40], token_ids[40:80], token_ids[80:]]
    apart = [{one.kv_format: one for one in compress_measure.measure_formats(model, part, notes)} for part in parts]
    for name, one in cut.items():
        whole = sum(found[name].kl_mean * len(part) for found, part in zip(apart, parts, strict=True)) / 100
        assert one.kl_mean == pytest.approx(whole, rel=1e-9)
        assert one.top1 == pytest.approx(
            sum(found[name].top1 * len(part) for found, part in zip(apart, parts, strict=True)) / 100
        )


def test_scenarios_are_those_that_are_advised_on() -> None:
    assert advised == compress.SCENARIOS


def test_fewer_heads_and_tokens_are_measured_as_well(
    tiny_model: Path, tmp_path: Path, command_line: CommandLine
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"The quick brown fox number {at} jumps over the lazy dog. " for at in range(60)))
    arguments = (tiny_model, "--context", "512", "--kv-cache-memory", "1MiB", "--measure", "--text", text)
    found = made(command_line, *arguments, "--text-tokens", "400")
    by_key = {(one["heads"], one["kv_cache_dtype"], one["tokens"]): one for one in found["likelihoods"]}
    own = found["kv_cache_dtype"]
    policy = next(one["tokens"] for one in found["rows"] if (one["kv_policy"] or "").startswith("streaming"))
    assert {("MQA", own, "all"), ("as trained", own, policy), ("as trained", "int8", policy)} <= set(by_key)
    assert all(one["num_tokens"] == 399 for one in by_key.values())
    whole, dropped = by_key["as trained", own, "all"], by_key["as trained", own, policy]
    assert whole["nats_per_token"] == whole["nats_before"] == dropped["nats_before"] != dropped["nats_per_token"]
    row = next(one for one in found["rows"] if one["ways"] == ["tokens"] and one["tokens"] == policy)
    assert row["nats_per_token"] == dropped["nats_per_token"]
    short = made(command_line, *arguments, "--text-tokens", "100")
    assert [one["tokens"] for one in short["likelihoods"]] == ["all"]
    assert any("policies keep 256 tokens and more" in note for note in short["notes"])
    ended = command_line("compress", *arguments, "--text-tokens", "300")
    assert "How well this model predicts 299 tokens" in ended.out


def test_measure_needs_a_text_that_can_be_read(tiny_model: Path, tmp_path: Path, command_line: CommandLine) -> None:
    short, binary = tmp_path / "short.txt", tmp_path / "binary.txt"
    short.write_text("")
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    for file, words in ((short, "the text has 0 tokens"), (binary, "is not UTF-8 text")):
        ended = command_line("compress", tiny_model, "--kv-cache-memory", "1MiB", "--measure", "--text", file)
        assert (ended.code, ended.out) == (1, "")
        assert words in ended.err


def test_lines_end_alike_however_a_file_ends_them(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes("one\r\ntwo\rthré\n".encode())
    assert read_text(text, 100) == "one\ntwo\nthré\n"


def write_one(model: Path, name: str, created: str, digest: str, *, is_certified: bool) -> None:
    row = {"format": "int8", "kl_mean": 0.001, "kl_p99": 0.01, "top1": 0.99, "certified": is_certified}
    about = {"weights_dtype": "f32", "max_model_len": 64, "text_digest": "", "max_kl": 0.02, "min_top1": 0.97}
    report = {"kind": FILE_KIND, "model_digest": digest, "created": created, "setting": None, "rows": [row], **about}
    write_certificate(model / f"kv-certificate.{name}.json", report)


def test_the_newest_certificate_of_the_model_counts(tmp_path: Path, command_line: CommandLine) -> None:
    model = make_tiny_model(tmp_path / "model")
    digest = open_model(model).digest
    write_one(model, "1", "2026-01-01", digest, is_certified=True)
    write_one(model, "2", "2026-02-02", digest, is_certified=False)
    write_one(model, "3", "2026-03-03", "f" * 64, is_certified=True)
    (model / "kv-certificate.4.json").write_text("{broken")
    found = made(command_line, model, "--context", "64", "--kv-cache-memory", "1MiB")
    (measured,) = found["measured"]
    assert (measured["source"], measured["is_good"]) == ("certificate kv-certificate.2.json", False)
    for words in (
        "kv-certificate.3.json is of another model (digest ffffffffffff)",
        "kv-certificate.4.json is damaged",
    ):
        assert any(words in note for note in found["notes"])
