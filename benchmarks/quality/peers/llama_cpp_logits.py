"""The logits of llama.cpp, for the comparison only: python llama_cpp_logits.py MODEL.gguf CHUNK THREADS.

Run it with an interpreter that has llama-cpp-python. Settings are that package's defaults (f16 KV), but for logits of
every token.
"""

from __future__ import annotations

import sys
from typing import Any

from pipe import serve, take_output

OUT = take_output()

import llama_cpp  # noqa: E402


def main(path: str, chunk: int, threads: int) -> None:
    model = llama_cpp.Llama(
        path, n_ctx=chunk, n_batch=chunk, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
    )

    def logits_of(ids: list[int]) -> Any:
        model.reset()
        model.eval(ids)
        return model.scores[: len(ids)]

    system = llama_cpp.llama_print_system_info().decode().strip()
    about = {
        "llama_cpp_python": llama_cpp.__version__,
        "settings": f"defaults: f16 KV, flash_attn {model.context_params.flash_attn_type}",
        "system": system,
    }
    serve(about, logits_of, OUT)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
