"""`octavo replay` as a user runs it: keys for scripts, tables, files, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import run
from octavo.cli.replay import MODES, ONLY_FOR, replay
from tests.replay.trace_files import mooncake, write_lines

KEYS = {"requests", "tokens", "blocks", "hit_blocks", "hit_rate", "token_hit_rate", "curve"}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    lines = [mooncake([0, 1, 2]), mooncake([0, 1, 3]), mooncake([0, 1, 2, 4])]
    return str(write_lines(tmp_path / "trace.jsonl", lines))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["replay", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_keys_of_the_cache_mode(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, trace, "--mode", "cache")
    assert set(found) >= KEYS
    assert (found["requests"], found["blocks"], found["hit_blocks"], found["hit_rate"]) == (3, 10, 5, 0.5)
    point = found["curve"][-1]
    assert set(point) >= {"blocks", "bytes", "hit_rate", "token_hit_rate"}
    assert point["bytes"] == point["blocks"] * 512 * 131072, "Llama-3.1-8B in bf16: 128 KiB a token"


def test_a_size_in_bytes_is_one_in_blocks(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_blocks = answer(capsys, trace, "--cache-blocks", "3")
    by_bytes = answer(capsys, trace, "--kv-cache-memory", "200MiB")
    assert by_blocks["cache_blocks"] == by_bytes["cache_blocks"] == 3
    assert by_blocks["hit_blocks"] == by_bytes["hit_blocks"] == 4


def test_another_model_has_other_bytes(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer(capsys, trace, "--config", str(tmp_path), "--kv-cache-dtype", "f32")
    assert found["kv_bytes_per_block"] == 512 * 2 * 2 * 2 * 16 * 4


def test_a_machine_prices_the_next_gib(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, trace, "--hardware", "H100")
    assert found["prefill_s_saved"] > 0
    assert max(point["prefill_s_saved_per_gib_more"] for point in found["curve"]) > 0


def test_tables_pictures_and_a_page(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, png, page = tmp_path / "a.svg", tmp_path / "a.png", tmp_path / "a.html"
    assert run(["replay", trace, "--plot", str(svg), "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "hit rate against the size of the cache" in out
    assert "0.5000" in out
    assert svg.read_text().startswith("<svg")
    assert "<svg" in page.read_text()
    assert "http://" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
    assert run(["replay", trace, "--plot", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_every_size_on_request(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, trace, "--curve", "all")
    assert [point["blocks"] for point in found["curve"]] == [1, 2, 4]


def test_a_trace_goes_out_as_mooncakes(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert run(["replay", trace, "--block-size", "128", "--write-trace", str(out)]) == 0
    assert "read it with --hash-block-tokens 128" in capsys.readouterr().err
    again = answer(capsys, str(out), "--hash-block-tokens", "128")
    direct = answer(capsys, trace, "--block-size", "128")
    assert {key: again[key] for key in ("blocks", "hit_blocks", "token_hit_rate")} == {
        key: direct[key] for key in ("blocks", "hit_blocks", "token_hit_rate")
    }


def test_lines_that_are_passed_over_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "t.jsonl", [mooncake([0]), "{", mooncake([0])])
    assert run(["replay", str(path), "--bad-lines", "skip", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["bad_lines"] == 1
    assert "passed over t.jsonl, line 2" in told.err
    assert run(["replay", str(path)]) == 1
    assert "t.jsonl, line 2: it is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache-blocks", "3", "--kv-cache-memory", "1GB"], "give one of them"),
        (["--kv-cache-memory", "1KB"], "less than one block of 67108864 bytes"),
        (["--config", "nowhere"], "--config is 'nowhere'; it must be a config.json"),
        (["--hardware", "abacus"], "--hardware 'abacus' is not in the catalogue"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype is 'int3'"),
        (["--curve", "1"], "--curve is '1'"),
        (["--plot", "a.gif"], "must end in .svg or .png"),
        (["--block-size", "100"], "names blocks of 512 tokens"),
        (["--sample", "2"], "--sample is 2.0"),
        (["--mode", "timed", "--sample", "0.5"], "--sample is for --mode cache; leave it out"),
        (["--latency-bound", "1"], "--latency-bound is for --mode allocators"),
        (["--host-memory", "1GB"], "--host-memory is for --advise"),
        (["--mode", "allocators", "--policy", "lfu"], "--policy lfu is for the modes cache and timed"),
        (["--policy", "mru", "--cache-blocks", "4"], "--policy is 'mru'; it must be one of lru, lfu, priority"),
    ],
)
def test_what_cannot_be_had_is_said(
    trace: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", trace, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_keys_of_the_allocators_mode(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mode", "allocators", "--config", "opt-13b", "--limit", "60", "--kv-cache-memory", "12GiB"]
    found = answer(capsys, "generate:sharegpt,requests=60", *arguments)
    row = next(one for one in found["rows"] if one["allocator"] == "paged 16")
    shares = ("used_share", "reserved_share", "internal_share", "external_share")
    assert set(row) >= {*shares, "max_concurrency", "throughput"}
    assert sum(row[name] for name in shares) == pytest.approx(1.0)
    assert found["kv_slots"] == 12 * 2**30 // 819_200
    assert run(["replay", "generate:sharegpt,requests=40", *arguments, "--latency-bound", "0.5"]) == 0
    assert "at equal latency" in capsys.readouterr().out


def test_a_model_that_fills_the_machine_leaves_no_cache(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mode", "allocators", "--config", "llama-2-70b", "--hardware", "L4"]
    assert run(["replay", "generate:sharegpt", *arguments]) == 1
    assert "no room for a KV cache" in capsys.readouterr().err


def test_keys_of_the_timed_mode(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, trace, "--mode", "timed", "--hardware", "H100", "--cache-blocks", "500")
    assert set(found) >= {"ttft_s", "itl_s", "output_tokens_per_s", "preemptions", "queue_max", "occupancy"}
    assert {"p50", "p95"} <= set(found["ttft_s"])
    assert (found["requests"], found["tokens"], found["output_tokens"], found["cache_blocks"]) == (3, 5120, 15, 500)
    assert found["hit_tokens"] > 0
    off = answer(capsys, trace, "--mode", "timed", "--hardware", "H100", "--no-enable-prefix-caching")
    assert off["hit_tokens"] == 0
    assert off["ttft_s"]["p95"] > found["ttft_s"]["p95"]


def test_another_policy_at_one_size(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, trace, "--policy", "lfu", "--cache-blocks", "5")
    assert set(found) >= KEYS
    assert (found["policy"], found["hit_blocks"]) == ("lfu", 5)
    assert run(["replay", trace, "--policy", "lfu"]) == 1
    assert "needs a size" in capsys.readouterr().err


def test_advice(capsys: pytest.CaptureFixture[str]) -> None:
    load = "generate:talks,requests=5,talks=1,turns=5,system=512,prompt=128,output=256"
    found = answer(capsys, load, "--advise")
    assert [turn["hit_tokens"] for turn in found["turns"]] == [0, 640, 1024, 1408, 1792]
    assert run(["replay", load, "--advise"]) == 0
    assert "turn by turn" in capsys.readouterr().out


def test_sharing(capsys: pytest.CaptureFixture[str]) -> None:
    trees = Path(__file__).parents[2] / "benchmarks" / "results" / "fork_trees.json"
    found = answer(capsys, "generate:alpaca,requests=50", "--mode", "sharing", "--fork-trees", str(trees))
    assert [(row["kind"], row["branches"]) for row in found["rows"]] == [
        *[("samples", count) for count in (2, 4, 6)],
        *[("beams", count) for count in (2, 4, 6)],
    ]
    assert run(["replay", "generate:alpaca", "--mode", "sharing", "--fork-trees", "nowhere"]) == 1
    assert "there are no fork trees nowhere" in capsys.readouterr().err


def test_every_flag_that_is_for_some_modes_exists() -> None:
    known = {parameter.name for parameter in replay.params}
    assert set(ONLY_FOR) <= known
    assert {mode for modes in ONLY_FOR.values() for mode in modes} <= {*MODES, "advise"}
