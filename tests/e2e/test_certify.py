"""A real model: every format on every path beside f32, and the certificate that comes of it."""

from __future__ import annotations

from pathlib import Path

from octavo.certify.certification import Ask, certify
from octavo.certify.limits import Limits
from octavo.certify.report import About, as_report, table, verdict
from octavo.cli.sample_text import SAMPLE_TEXT
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model, open_model


def test_int8_on_the_default_weights(smollm2_path: Path) -> None:
    """Inputs of int8 weights are rounded to 8 bits: bf16 itself moves what f32 says, and the report tells that."""
    source, ops = open_model(smollm2_path), NativeOps(2)
    tokenizer = Tokenizer.from_source(source.tokenizer_source)
    model = load_model(source, ops, "int8")
    ask = Ask(
        token_ids=tokenizer.encode(SAMPLE_TEXT, add_special_tokens=False)[:200],
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        formats=("bf16", "int8", "fp8_e4m3"),
        limits=Limits(min_top1=0.9),
        max_model_len=201,
        scales={},
        clock=iter(range(1_000_000)).__next__,
    )
    found = certify(model, ops, ask)
    report = as_report(found, ask, About(source.digest, source.config.dtype, "int8", ops.instruction_set, "", ""), ops)
    assert report["left_out"] == {"fp8_e4m3": "it wants scales (octavo calibrate)"}
    assert report["chosen"] == "int8"
    bf16, int8 = report["rows"]
    assert 0 < bf16["kl_mean"] < 0.01
    assert 0.8 * bf16["kl_mean"] < int8["kl_mean"] < 0.02, "beside rounded inputs, 200 tokens hardly tell them apart"
    assert all(path["same_bits_as_cold"] for row in report["rows"] for path in row["paths"].values())
    assert len(table(report)) == 4
    lines = verdict(report)
    assert lines[0].startswith("chosen: int8 (11880 bytes a token, 52% of bf16)")
    assert any("bf16 itself has KL" in line for line in lines)
