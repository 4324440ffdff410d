"""How far each KV format moves a model's answers from those with an f32 cache, and what it finds in long prompts.

    python benchmarks/quality/kv_formats.py MODEL --text NAME=FILE... [--task NAME=FILE...] --out PATH
        [--tokens 20000] [--weights-dtype f32] [--max-model-len 8192] [--prompts 12] [--records 20] [--formats NAMES]

A text is measured over the whole vocabulary, in pieces of 512 tokens, and once more on every path of `octavo certify`,
over as many tokens as --max-model-len says (0: not at all). fp8 and int8 are measured without scales
(fp8 with the scale 1) and with those of each of --schemes, which are calibrated on what follows in the text. A task
is a file of prompts, one JSON object a line: those of LongEval (`prompt`, `expected_number`) and of key-value retrieval
(`ordered_kv_records`, `key`, `value`; `--records` of them, so that small models have a chance). An answer counts if
every token of it is the most likely one after those before it; `answer_nats` is what a token of the answer costs in the
mean. Without a text, scales are calibrated on the first prompts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from about import commit, processor

from octavo.certify.calibration import CalibrationAsk, calibrate
from octavo.certify.divergence import Distance, Expected, Tally
from octavo.certify.measure import measure
from octavo.certify.paths import PIECE_TOKENS, paths_of
from octavo.certify.probe import Probe
from octavo.certify.setting import REFERENCE, Setting
from octavo.certify.text_digest import text_digest
from octavo.core.config import SchedulerConfig
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.engine.tokenizer import Tokenizer
from octavo.executor.config import SCALABLE_FORMATS, schemes_of
from octavo.executor.one_text import OneText
from octavo.kernels.native import NativeOps
from octavo.models.loader import CausalLM, load_model, open_model

CALIBRATION_TOKENS = 4096
PIECES_A_REPORT = 2
Named = list[tuple[str, Setting]]


def read(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def settings_of(model: CausalLM, formats: Sequence[str], schemes: str, calibration: Sequence[int]) -> Named:
    found: Named = [(REFERENCE, Setting.of(model, REFERENCE))]
    for name in formats:
        if name not in SCALABLE_FORMATS:
            found.append((name, Setting.of(model, name)))
            continue
        if "none" in schemes.split(","):
            found.append((f"{name}, uncalibrated", Setting.of(model, name)))
        for scheme in [one for one in schemes_of(name) if one in schemes.split(",")]:
            scales = calibrate(model, calibration, CalibrationAsk(name, scheme, "", ""))
            found.append((f"{name}, calibrated by {scheme}", Setting.of(model, name, scales)))
    return found


def rows_of_paths(model: CausalLM, ops: NativeOps, named: Named, ids: Sequence[int], longest: int) -> list[Any]:
    """Every path, over as much of the text as the longest one takes: law 1 for each format, and long texts."""
    most = min(longest, len(ids) + 1)
    paths = paths_of(ids[: most - 1], most, model.config.vocab_size)
    rows = []
    for (name, setting), results in zip(named, measure(model, ops, [one for _, one in named], paths), strict=True):
        found = {path: {**as_json(one.distance), "same_bits_as_cold": one.is_same} for path, one in results.items()}
        rows.append({"format": name, "bytes_per_token": setting.bytes_per_token, "paths": found})
    return rows


def as_json(distance: Distance) -> dict[str, Any]:
    return {
        "tokens": distance.num_tokens,
        "kl_mean": round(distance.kl_mean, 6),
        "kl_p99": round(distance.kl_p99, 6),
        "top1": round(distance.top1, 5),
        "perplexity": round(distance.perplexity, 4),
    }


def rows_of_text(model: CausalLM, named: Named, ids: Sequence[int]) -> Iterator[list[Any]]:
    """In pieces of PIECE_TOKENS, each from an empty cache; the rows so far after each few pieces, and at the end."""
    runs = [OneText(model, setting.spec.groups, PIECE_TOKENS, setting.scales) for _, setting in named]
    tallies = [Tally() for _ in named]
    starts = range(0, len(ids), PIECE_TOKENS)
    for number, start in enumerate(starts, 1):
        piece = ids[start : start + PIECE_TOKENS]
        logits = runs[0].run(piece)
        expected = Expected.of(logits.copy())
        tallies[0].add(logits, expected, piece[1:])
        for run, tally in zip(runs[1:], tallies[1:], strict=True):
            tally.add(run.run(piece), expected, piece[1:])
        if number % PIECES_A_REPORT == 0 or number == len(starts):
            yield [
                {"format": name, **as_json(tally.distance())} for (name, _), tally in zip(named, tallies, strict=True)
            ]


def prompts_of(path: Path, count: int, num_records: int) -> Iterator[tuple[str, str]]:
    """Prompt and answer of each line."""
    for line in read(path).splitlines()[:count]:
        entry = json.loads(line)
        if "expected_number" in entry:
            yield entry["prompt"] + " The <REGISTER_CONTENT> is <", f"{entry['expected_number']}>"
        else:
            others = [one for one in entry["ordered_kv_records"] if one[0] != entry["key"]][: num_records - 1]
            kept = [one for one in entry["ordered_kv_records"] if one in others or one[0] == entry["key"]]
            records = json.dumps(dict(kept), indent=1)
            asked = f'JSON data:\n{records}\n\nKey: "{entry["key"]}"\nCorresponding value: "'
            yield f"Extract the value of the key from the JSON object below.\n\n{asked}", f'{entry["value"]}"'


def rows_of_task(
    model: CausalLM,
    ops: NativeOps,
    tokenizer: Tokenizer,
    named: Named,
    prompts: Sequence[tuple[str, str]],
    longest: int,
) -> Mapping[str, Any]:
    """Prompts that are too long for the model, or for `longest`, are left out."""
    encoded = []
    for prompt, answer in prompts:
        before = tokenizer.encode(prompt, add_special_tokens=False)
        whole = tokenizer.encode(prompt + answer, add_special_tokens=False)
        same = next(i for i, (a, b) in enumerate(zip([*before, -1], whole, strict=False)) if a != b)
        if len(whole) < min(longest, model.config.max_position_embeddings):
            encoded.append((whole, same))
    rows = []
    for name, setting in named:
        found, nats, num_tokens = 0, 0.0, 0
        for whole, same in encoded:
            config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=256, max_model_len=len(whole) + 1)
            probe = Probe(model, ops, setting.spec, config, setting.scales)
            probe.add("prompt", whole, same - 1)
            is_right = True
            while probe.has_work:
                for heard in probe.step():
                    after = whole[heard.first + 1 : heard.first + 1 + len(heard.logits)]
                    is_right = is_right and heard.logits.argmax(axis=1).tolist()[: len(after)] == after
                    expected = Expected.of(heard.logits)
                    nats -= float(expected.logarithms[np.arange(len(after)), after].sum(dtype=np.float64))
                    num_tokens += len(after)
            found += is_right
        rows.append({"format": name, "found": found, "answer_nats": round(nats / max(num_tokens, 1), 5)})
        print(f"  {name:36s} {found} of {len(encoded)}, {rows[-1]['answer_nats']} nats", flush=True)
    lengths = [len(whole) for whole, _ in encoded]
    return {"prompts": len(encoded), "mean_tokens": round(float(np.mean(lengths)), 1) if lengths else 0, "rows": rows}


def about(args: argparse.Namespace, digest: str, ops: NativeOps) -> dict[str, Any]:
    said = [Path(one).name if "/" in one and "=" not in one else one.split("/")[-1] for one in sys.argv[1:]]
    return {
        "model": args.model.name,
        "digest": digest,
        "weights_dtype": args.weights_dtype,
        "instruction_set": ops.instruction_set,
        "machine": processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit(),
        "command": " ".join(["python", "benchmarks/quality/kv_formats.py", *said]),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--task", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--weights-dtype", default="f32")
    parser.add_argument("--schemes", default="none,hadamard", help="what there is a calibrated scale for")
    parser.add_argument("--formats", default=",".join(name for name in FORMAT_BYTES if name != REFERENCE))
    return parser.parse_args()


def main() -> None:
    args = parse()
    ops, source = NativeOps(), open_model(args.model)
    tokenizer = Tokenizer.from_source(source.tokenizer_source)
    model = load_model(source, ops, args.weights_dtype)
    longest = min(args.max_model_len, source.config.max_position_embeddings)
    report: dict[str, Any] = {"about": about(args, source.digest, ops), "texts": [], "tasks": []}
    named: Named = []
    for one in args.text:
        name, _, path = one.partition("=")
        every = tokenizer.encode(read(Path(path)), add_special_tokens=False)
        ids, calibration = every[: args.tokens], every[args.tokens :][:CALIBRATION_TOKENS]
        named = settings_of(model, args.formats.split(","), args.schemes, calibration or ids)
        print(f"{name}, {len(ids)} tokens", flush=True)
        entry = {"text": name, "digest": text_digest(ids), "paths": [], "rows": []}
        report["texts"].append(entry)
        if args.max_model_len:
            entry["paths"] = rows_of_paths(model, ops, named, ids, longest)
        for rows in rows_of_text(model, named, ids):
            entry["rows"] = rows
            args.out.write_text(json.dumps(report, indent=1) + "\n")
        for row in entry["rows"]:
            print(f"  {row['format']:36s} KL {row['kl_mean']:.5f} top-1 {row['top1']:.2%}", flush=True)
    for one in args.task:
        name, _, path = one.partition("=")
        print(name, flush=True)
        prompts = list(prompts_of(Path(path), args.prompts, args.records))
        if not named:
            first = [one for prompt, _ in prompts for one in tokenizer.encode(prompt, add_special_tokens=False)]
            named = settings_of(model, args.formats.split(","), args.schemes, first[:CALIBRATION_TOKENS])
        report["tasks"].append({"task": name, **rows_of_task(model, ops, tokenizer, named, prompts, longest)})
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
