"""`octavo certify` from the text to the server that uses the certificate and says so."""

from __future__ import annotations

import json
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from octavo.certify.limits import Limits
from octavo.cli.certificate_plot import draw, pareto
from octavo.cli.sample_text import SAMPLE_TEXT
from octavo.planner.chart import Words
from tests.cli.conftest import CommandLine
from tests.cli.test_serve import ask, serving, url_of
from tests.models.tiny_models import make_tiny_model

ONE = ("--threads", "1")
KEYS = {"model_digest", "text_digest", "reference", "rows", "chosen"}
ROW_KEYS = {
    "format", "bytes_per_token", "kl_mean", "kl_p99", "top1", "perplexity", "needle_recall", "tokens_per_s", "paths",
    "certified",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of its own: certificates are written beside it. Its heads are wide enough for every format."""
    return make_tiny_model(tmp_path / "model", "llama_wide_heads")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SAMPLE_TEXT)
    return path


def certificate_of(model: Path) -> Path:
    (path,) = model.glob("kv-certificate.*.json")
    return path


def test_from_the_text_to_the_server(command_line: CommandLine, model: Path, text: Path) -> None:
    before = command_line("generate", model, "-p", "x", "--kv-cache-dtype", "certified")
    assert before.code == 1
    assert "make one with `octavo certify MODEL --text FILE`" in before.err
    made = command_line("certify", model, *ONE, "--text", text, "--tokens", "400", "--json")
    assert made.code == 0, made.err
    report = json.loads(made.out)
    assert set(report) >= KEYS
    assert all(set(row) >= ROW_KEYS for row in [report["reference"], *report["rows"]])
    assert [row["format"] for row in report["rows"]][:2] == ["bf16", "f16"]
    assert report["reference"]["format"] == "f32"
    for row in report["rows"]:
        assert set(row["paths"]) == {"cold", "prefix_hit", "batched", "chunked", "long"}
        assert all(path["same_bits_as_cold"] for path in row["paths"].values())
    certified = [row for row in report["rows"] if row["certified"]]
    assert report["chosen"] == min(certified, key=lambda row: row["bytes_per_token"])["format"]
    path = certificate_of(model)
    assert json.loads(path.read_text()).items() >= report.items()
    assert str(path) in made.err
    with serving(model, "--kv-cache-dtype", "certified") as (_, lines):
        assert f"certified by {path.name} (KL at most 0.02, top-1 at least 0.97)" in lines[0]
        status = ask(f"{url_of(lines)}/v1/kv/status")
        assert status["kv_cache_dtype"] == report["chosen"]
        assert status["kv_certificate"]["file"] == path.name
        chosen = next(row for row in report["rows"] if row["format"] == report["chosen"])
        assert status["kv_bytes_per_token"] == chosen["bytes_per_token"]
        assert any("max_model_len is at most 401" in line for line in status["degraded"])


def test_nothing_within_the_limits_is_said_format_by_format(
    command_line: CommandLine, model: Path, text: Path, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.png"
    made = command_line(
        "certify", model, *ONE, "--text", text, "--tokens", "300", "--max-kl", "1e-12", "--formats", "bf16,int8",
        "--plot", plot,
    )  # fmt: skip
    assert made.code == 0, made.err
    assert "nothing is certified" in made.out
    for name in ("bf16", "int8"):
        assert f"not certified: {name}: KL is " in made.out
    assert plot.read_bytes().startswith(b"\x89PNG")
    refused = command_line("generate", model, "-p", "x", "--kv-cache-dtype", "certified")
    assert refused.code == 1
    assert "found no setting within its limits" in refused.err


def test_a_mix_of_layers_is_found_and_used(command_line: CommandLine, model: Path, text: Path) -> None:
    """k8v4 keeps the limit where some layers are left out, and no other format is measured."""
    alone = command_line("certify", model, *ONE, "--text", text, "--formats", "k8v4", "--no-mixes", "--json")
    kl = json.loads(alone.out)["rows"][0]["kl_mean"]
    limits = ("--max-kl", str(kl * 0.9), "--min-top1", "0")
    made = command_line("certify", model, *ONE, "--text", text, "--formats", "k8v4", *limits, "--json")
    assert made.code == 0, made.err
    report = json.loads(made.out)
    assert not report["rows"][0]["certified"]
    chosen = next(row for row in report["rows"] if row["format"] == report["chosen"])
    assert chosen["skip_layers"]
    assert chosen["kl_mean"] <= kl * 0.9
    assert chosen["bytes_per_token"] < report["reference"]["bytes_per_token"]
    used = command_line("generate", model, "-p", "The river", "--max-tokens", "3", "--kv-cache-dtype", "certified")
    assert used.code == 0, used.err


def test_a_folder_that_cannot_be_written_has_its_certificate_in_the_cache(
    command_line: CommandLine, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.executor import certificate, kv_scales

    cache = tmp_path / "cache"
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    write = certificate.write_whole

    def refuse(path: Path, data: bytes) -> None:
        if path.parent == model:  # permissions would not stop the owner of every file
            raise PermissionError(13, "Permission denied")
        write(path, data)

    monkeypatch.setattr(certificate, "write_whole", refuse)
    monkeypatch.setattr(kv_scales, "write_whole", refuse)
    (model / "kv-scales.int8.safetensors").unlink(missing_ok=True)
    made = command_line("certify", model, *ONE, "--text", text, "--tokens", "200", "--formats", "int8")
    assert made.code == 0, made.err
    assert str(cache / "certificates" / "model") in made.err
    used = command_line("generate", model, "-p", "x", "--max-tokens", "2", "--kv-cache-dtype", "certified")
    assert used.code == 0, used.err
    named = command_line("certify", model, *ONE, "--text", text, "--tokens", "200", "--output", model / "x")
    assert "cannot be written" in named.err
    assert "give --output FILE" in named.err
    assert "KL mean" in named.out, "what was measured is not lost"
    assert stat.S_ISDIR(cache.stat().st_mode)


def test_flags_and_documents_have_the_limits_of_the_code() -> None:
    from octavo.cli.certify import certify

    limits = asdict(Limits())
    flags = {one.name: one.default for one in certify.params if one.name in limits}
    assert flags == limits
    docs = Path(__file__).parents[2] / "docs"
    for page, words in (
        ("reference/cli.md", "| `--max-kl X` | {max_kl} |"),
        ("reference/cli.md", "| `--min-top1 X` | {min_top1} |"),
        ("reference/compress.md", "a mean KL of at most {max_kl} nats and the same best token for {min_top1:.0%}"),
        ("how-to/certify-a-kv-format.md", "(`--max-kl {max_kl}`, `--min-top1 {min_top1}`)"),
    ):
        assert words.format(**limits) in (docs / page).read_text().replace("\n", " "), page


def test_wrong_asks(command_line: CommandLine, model: Path, text: Path, tmp_path: Path) -> None:
    base = ("certify", model, *ONE, "--text", text)
    assert command_line("certify", model).code == 2
    assert "'int3' is none of bf16" in command_line(*base, "--formats", "int3").err
    assert "max_kl is -1.0" in command_line(*base, "--max-kl", "-1").err
    assert "must end in .svg or .png" in command_line(*base, "--plot", tmp_path / "plot.gif").err
    long = command_line(*base, "--max-model-len", "513")
    assert long.code == 1
    assert "513" in long.err
    short = command_line(*base, "--tokens", "100", "--max-model-len", "400")
    assert "needs a text of 399 tokens" in short.err
    sim = command_line(
        "serve", "--executor", "sim", "--config", model, "--hardware", "H100", "--kv-cache-dtype", "certified"
    )
    assert sim.code == 1
    assert "certified" in sim.err


def row(name: str, num_bytes: int, kl: float, certified: bool = False) -> dict[str, Any]:
    return {"format": name, "bytes_per_token": num_bytes, "kl_mean": kl, "certified": certified}


def test_the_front_is_what_nothing_beats_in_both() -> None:
    rows = [row("a", 100, 0.01), row("b", 50, 0.02), row("worse", 100, 0.03), row("c", 25, 0.5), row("d", 60, 0.02)]
    report = {"rows": rows, "max_kl": 0.02}
    assert [one["format"] for one in pareto(report)] == ["c", "b", "a"]
    said = [part.text for part in draw(report).parts if isinstance(part, Words)]
    assert {one["format"] for one in rows} <= set(said)
    assert draw({"rows": [row("exact", 100, 0.0)], "max_kl": 0.02}).parts
