"""How far KV formats move a real model on real text. `make validate DATA=DIR`; tables are in benchmarks/results."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from octavo.certify.calibration import CalibrationAsk, calibrate
from octavo.certify.measure import measure
from octavo.certify.paths import paths_of
from octavo.certify.setting import REFERENCE, Setting
from octavo.engine.tokenizer import Tokenizer
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model, open_model

pytestmark = pytest.mark.data

TOKENS, CALIBRATION_TOKENS = 1536, 1024
MOST_KL = {"bf16": 0.0005, "int8": 0.0005, "fp8_e4m3": 0.01}


def test_eight_bits_move_a_real_model_by_no_more_than_is_promised(smollm2_path: Path) -> None:
    """Weights in f32, so that nothing but the cache is rounded; both formats calibrated."""
    folder = os.environ.get("OCTAVO_DATA")
    assert folder, "OCTAVO_DATA names the folder of real data; make validate DATA=DIR sets it"
    text = gzip.decompress((Path(folder) / "text/wikitext2_valid.txt.gz").read_bytes()).decode()
    source, ops = open_model(smollm2_path), NativeOps()
    ids = Tokenizer.from_source(source.tokenizer_source).encode(text[:20_000], add_special_tokens=False)
    model = load_model(source, ops, "f32")
    calibration = ids[TOKENS : TOKENS + CALIBRATION_TOKENS]
    asks = [CalibrationAsk(name, "hadamard", source.digest, "") for name in ("fp8_e4m3", "int8")]
    scales = {ask.kv_format: calibrate(model, calibration, ask) for ask in asks}
    settings = [Setting.of(model, name, scales.get(name)) for name in (REFERENCE, *MOST_KL)]
    found = measure(model, ops, settings, paths_of(ids[:TOKENS], 1024, source.config.vocab_size))
    for setting, paths in zip(settings[1:], found[1:], strict=True):
        assert all(path.is_same for path in paths.values()), setting.name
        for name in ("cold", "long"):
            kl = paths[name].distance.kl_mean
            print(f"{setting.name} {name}: KL {kl:.5f}, top-1 {paths[name].distance.top1:.2%}")
            assert kl <= MOST_KL[setting.name], name
