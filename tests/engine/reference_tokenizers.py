"""transformers' tokenizers, and small GGUF files for both sides to read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf


def reference(directory: Path, **options: Any) -> Any:
    """transformers' tokenizer; its own warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, **options)


def smollm2_reference(file: Path) -> Any:
    """SmolLM2's tokenizer as its own tokenizer.json cuts text: every digit alone, then GPT-2's way.

    From a GGUF file, transformers takes GPT-2's cut alone and so misses the digits (`pre` is "smollm").
    """
    from tokenizers import pre_tokenizers

    tokenizer = reference(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def write_gguf(file: Path, metadata: Mapping[str, object]) -> None:
    """A GGUF file of nothing but a tokenizer and the sizes that transformers wants to see."""
    architecture = str(metadata["general.architecture"])
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(8)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
