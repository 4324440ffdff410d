"""What attention windows pass on through the layers, and what is lost beyond one window, on real text.

python benchmarks/quality/window_relay.py --narrow MODEL --mixed MODEL --texts FOLDER --out FILE.json

A text C is read after its true beginning A, and after a beginning B from another book. How far the predictions differ,
at a distance d behind the place where C begins, is what the model still knows of A and B there: as KL(A || B), and as
the nats that the true beginning saves. From d = window on, no token of C sees any of A or B itself: what is still known
was relayed by layers, each of which looks back one window further. With windows in all layers nothing is relayed
further than layers x (window - 1) tokens; there, both predictions must be the same bits.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from about import commit, processor

from octavo.core.kv_spec import KVSpec
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.decoder_layer import run_layers
from octavo.kernels.native import NativeOps
from octavo.kernels.ops import F32, AttentionBatch, DecoderRows
from octavo.models.loader import load_model, open_model

ROWS = 128  # of logits at a time
Parts = tuple[list[int], list[int], list[int]]
EVERY = 4  # of C's tokens the predictions of one are compared


class ImposedWindow(NativeOps):
    """Layers that see everything see a window instead."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self._imposed = window

    def decoder_layers(self, layers: Any, kv_layers: Any, count: int, rows: DecoderRows) -> None:
        run_layers(self, layers, kv_layers, count, rows)

    def paged_attention(self, *given: Any, window: int = 0, **options: Any) -> None:
        super().paged_attention(*given, window=window or self._imposed, **options)


class Reader:
    """One model, with a window imposed on the layers that have none of their own (0: as it is)."""

    def __init__(self, path: Path, window: int, num_tokens: int) -> None:
        self._source = open_model(path)
        ops = ImposedWindow(window)
        self._model = load_model(self._source, ops)
        spec = KVSpec(self._model.kv_groups("f32"), 16)
        self._num_blocks = -(-num_tokens // 16)
        self._storage = KVStorage(spec, self._num_blocks * len(spec.groups))
        self._num_groups = len(spec.groups)
        own = [layer.window for layer in spec.groups for _ in layer.layer_indices]
        self.num_layers, self.num_full_layers = len(own), sum(one is None and not window for one in own)
        self.window = max([window, *[one for one in own if one is not None]])

    @property
    def reach(self) -> int | None:
        """Tokens that anything can be passed on by windows; None: some layers see everything."""
        return None if self.num_full_layers else self.num_layers * (self.window - 1)

    def tokens(self, text: str) -> list[int]:
        tokenizer, source = Tokenizer, self._source.tokenizer_source
        assert source.gguf_metadata is not None
        return tokenizer.from_gguf_metadata(source.gguf_metadata).encode(text)

    def logprobs(self, token_ids: list[int], first: int) -> F32:
        """[wanted, vocabulary]: after every EVERY-th token from `first` on."""
        tables = np.arange(self._num_groups * self._num_blocks, dtype=np.int32).reshape(self._num_groups, 1, -1)
        found = []
        for start in range(0, len(token_ids), ROWS):
            ids = np.array(token_ids[start : start + ROWS], np.int32)
            wanted = [i for i in range(len(ids)) if start + i >= first and (start + i - first) % EVERY == 0]
            batch = AttentionBatch(np.array([0, len(ids)], np.int32), np.array([start], np.int32), tables)
            logits = self._model.forward(ids, batch, self._storage.layers, np.array(wanted, np.int32))
            if wanted:
                logits -= logits.max(axis=1, keepdims=True)
                found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
        return np.concatenate(found)


def compare(reader: Reader, pairs: list[Parts], bins: list[int]) -> dict[str, Any]:
    """pairs: A, B and C of each text; bins: where each distance band begins, and the end of the last."""
    divergence, saved, nats = [], [], []
    for a, b, c in pairs:
        after_a, after_b = (reader.logprobs([*start, *c[:-1]], len(start)) for start in (a, b))
        divergence.append((np.exp(after_a) * (after_a - after_b)).sum(axis=1))
        following = np.array(c[1::EVERY][: len(after_a)])
        rows = np.arange(len(following))
        saved.append(after_a[rows, following] - after_b[rows, following])
        nats.append(-after_a[rows, following])
    distance = np.arange(divergence[0].shape[0]) * EVERY
    bands = []
    for low, high in itertools.pairwise(bins):
        inside = (distance >= low) & (distance < high)
        bands.append(
            {
                "from": low,
                "to": high,
                "kl": float(f"{np.mean([one[inside] for one in divergence]):.4g}"),
                "nats_saved": round(float(np.mean([one[inside] for one in saved])), 4),
                "nats": round(float(np.mean([one[inside] for one in nats])), 4),
            }
        )
    result: dict[str, Any] = {
        "window": reader.window or None,
        "layers": reader.num_layers,
        "layers_that_see_everything": reader.num_full_layers,
        "reach": reader.reach,
        "bands": bands,
    }
    if reader.reach is not None and (beyond := distance >= reader.reach).any():
        result["largest_kl_beyond_reach"] = float(max(np.abs(one[beyond]).max() for one in divergence))
    return result


def cut(
    reader: Reader, texts: Path, count: int, before: int, length: int
) -> list[tuple[list[int], list[int], list[int]]]:
    def read(name: str) -> list[int]:
        return reader.tokens(gzip.decompress((texts / name).read_bytes()).decode()[: 12 * count * (before + length)])

    own, other = read("book_pride_and_prejudice.txt.gz"), read("shakespeare_complete_first.txt.gz")
    found = []
    for index in range(count):
        at = 500 + index * (before + length)
        found.append((own[at : at + before], other[at : at + before], own[at + before : at + before + length]))
        assert len(found[-1][2]) == length, "the text is too short"
    return found


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(5 * len(models), 3.4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for row in (one for one in rows if one["model"] == model):
            middle = [(band["from"] + band["to"]) / 2 for band in row["bands"]]
            drawn = axis.plot(middle, [max(band["kl"], 1e-7) for band in row["bands"]], marker="o", label=row["name"])
            if row["imposed_window"] or row["layers_that_see_everything"] < row["layers"]:
                axis.axvline(row["window"], color=drawn[0].get_color(), linestyle=":", linewidth=1)
        axis.set_yscale("log")
        axis.set_xlabel("tokens since the beginnings differed (dotted: one window)")
        axis.set_ylabel("KL of the next token")
        axis.set_title(model, fontsize=10)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--narrow", type=Path, required=True, help="a model without windows; 128 and 16 are imposed")
    parser.add_argument("--mixed", type=Path, required=True, help="a model with windows of 512 and full layers")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6, help="texts")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for path, windows, before, length, bins in (
        (given.narrow, (0, 128, 16), 512, 1024, [0, 16, 64, 128, 256, 384, 512, 768, 1024]),
        (given.mixed, (0, 512), 1024, 2048, [0, 128, 512, 768, 1024, 1536, 2048]),
    ):
        for window in windows:
            reader = Reader(path, window, before + length)
            name = f"{window} in the layers without one" if window else "as it is"
            row = {"model": path.stem, "name": name, "imposed_window": window or None}
            rows.append(row | compare(reader, cut(reader, given.texts, given.count, before, length), bins))
            print(json.dumps(rows[-1]), flush=True)
    about = {
        "texts": given.count,
        "kv_cache_dtype": "f32",
        "machine": processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit(),
        "command": f"python {Path(sys.argv[0]).name} --narrow {given.narrow.name} --mixed {given.mixed.name} "
        f"--texts FOLDER --count {given.count}",
    }
    given.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    draw(rows, given.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
