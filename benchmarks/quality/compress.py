"""What `octavo compress --measure` finds of a model on a text, with machine and commit beside it.

python benchmarks/quality/compress.py MODEL --text FILE [--context 4K] [--tokens 1500] --out FILE.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from about import commit, processor

KEPT = ("kv_cache_dtype", "context", "measured", "likelihoods", "notes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", default="4K")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asked = [given.model, "--context", given.context, "--memory", "4GiB", "--measure", "--json"]
    asked += ["--text", given.text, "--text-tokens", given.tokens]
    command = [sys.executable, "-m", "octavo.cli.main", "compress", *map(str, asked)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    about = {
        "model": given.model.name,
        "text": given.text.name,
        "machine": processor(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": version("numpy")},
        "commit": commit(),
        "command": f"python compress.py {given.model.name} --text {given.text.name}"
        f" --tokens {given.tokens} --context {given.context}",
    }
    result = {name: found[name] for name in KEPT}
    given.out.write_text(json.dumps({"about": about, **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
