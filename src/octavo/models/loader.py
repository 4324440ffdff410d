"""The way in: open a model by its headers alone, then load its weights. It joins files, config, weights and model."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.kernels.ops import Ops
from octavo.models.config import ModelConfig
from octavo.models.families import config_from_gguf, config_from_json, family_of
from octavo.models.family import CausalLM
from octavo.models.generation import GenerationDefaults, generation_from_directory, generation_from_gguf
from octavo.models.gguf_file import GgufFile
from octavo.models.json_file import read_json
from octavo.models.packed_size import bits_of, packed_bytes, resolve_weights_dtype
from octavo.models.packing import WeightSource, dtype_of, pack_parts
from octavo.models.parts import Parts, check_tensors, part_shape, without_prefix
from octavo.models.safetensors_file import INDEX_NAME, SINGLE_NAME, SafetensorsFiles
from octavo.models.tensor_file import TensorFile, tensors_digest

_TOKENIZER_KEYS = ("tokenizer.", "general.")
_PICKLE_ENDINGS = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where the tokenizer is: exactly one of the two."""

    directory: Path | None = None  # with tokenizer.json
    gguf_metadata: Mapping[str, Any] | None = None  # keys "tokenizer.*" and "general.*"; text, numbers, lists of them


@dataclass(frozen=True, slots=True)
class ModelSource:
    """An opened model: all that its headers say, and the mapped files to load from."""

    path: Path
    config: ModelConfig
    digest: str  # SHA-256 in hex of config and tensors (see tensor_file); not of tokenizer or template
    tokenizer_source: TokenizerSource
    generation: GenerationDefaults
    weights: WeightSource

    @property
    def stored_dtype(self) -> str:
        """What most weights are stored as."""
        return self.config.dtype

    def weights_bytes(self, weights_dtype: str) -> int:
        """What the weights will take in memory in this dtype."""
        parts, tensors = self.weights.parts, self.weights.file.tensors
        total = sum(4 * math.prod(vector.shape) for vector in parts.vectors if vector.tensor in tensors)
        for matrix in parts.matrices:
            held = dtype_of(matrix, weights_dtype)
            shapes = [part_shape(rows) for rows in matrix.rows]
            if any(rows.change is not None for rows in matrix.rows):
                total += sum(math.prod(shape) * bits_of(held) // 8 for shape in shapes)
                continue
            kinds = {tensors[rows.tensor].dtype for rows in matrix.rows}
            shape = sum(rows for rows, _ in shapes), shapes[0][1]
            total += packed_bytes(shape, held, kinds.pop() if len(kinds) == 1 else "")
        return total


def open_model(path: Path) -> ModelSource:
    """Read the headers of a model directory or a .gguf file. ModelError, in one sentence, for whatever is wrong."""
    try:
        return _open(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from error


def _open(path: Path) -> ModelSource:
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelError(f"there is no model at {path}; give a model directory or a .gguf file")
    if path.suffix == ".safetensors":
        raise ModelError(
            f"{path} is one weight file; give the directory {path.parent} with its config.json and tokenizer"
        )
    if path.suffix in _PICKLE_ENDINGS:
        raise _refuse_pickle(path)
    return _open_gguf(path)


def load_model(
    source: ModelSource, ops: Ops, weights_dtype: str = "auto", progress: Callable[[int, int], None] | None = None
) -> CausalLM:
    """Read, dequantise and pack the weights; progress(bytes done, bytes in all)."""
    dtype = resolve_weights_dtype(weights_dtype, source.config.dtype)
    return family_of(source.config).build(source.config, pack_parts(source.weights, ops, dtype, progress), ops)


def _open_directory(directory: Path) -> ModelSource:
    has_safetensors = (directory / INDEX_NAME).exists() or (directory / SINGLE_NAME).exists()
    if not has_safetensors or not (directory / "config.json").exists():
        return _open_directory_of_gguf(directory)
    data = read_json(directory / "config.json")
    config = config_from_json(data)
    files = SafetensorsFiles(directory)
    family = family_of(config)
    parts: Parts = family.parts(config, False)
    if family.prefix and not any(name.startswith(family.prefix) for name in files.tensors):
        parts = without_prefix(parts, family.prefix)
    weights = WeightSource(files, parts)
    check_tensors(weights.parts, files, config.architecture)
    config = _with_dtype(config, files)
    return ModelSource(
        path=directory,
        config=config,
        digest=_digest(config, files),
        tokenizer_source=TokenizerSource(directory=directory),
        generation=generation_from_directory(directory, data, config.vocab_size),
        weights=weights,
    )


def _open_directory_of_gguf(directory: Path) -> ModelSource:
    """A directory that is no complete Hugging Face model: its one GGUF file, or an error that says what it is."""
    found = sorted(directory.glob("*.gguf"))
    if len(found) == 1:
        return _open_gguf(found[0])
    if found:
        raise ModelError(f"{directory} has {len(found)} GGUF files; give one of them: {found[0]}")
    if (directory / "adapter_config.json").exists():
        raise ModelError(
            f"{directory} is a LoRA adapter, which is not supported yet; merge it into its base model and give that"
        )
    if not (directory / "config.json").exists():
        raise ModelError(f"{directory} has neither a config.json nor a .gguf file; it is not a model directory")
    config_from_json(read_json(directory / "config.json"))  # an architecture that is not supported is told first
    for file in sorted(directory.iterdir()):
        if file.suffix in _PICKLE_ENDINGS:
            raise _refuse_pickle(file)
    raise ModelError(f"{directory} has no weights ({SINGLE_NAME} or {INDEX_NAME}); download the model again")


def _refuse_pickle(path: Path) -> ModelError:
    return ModelError(
        f"{path} is a pickle file, which can run code when it is read and is not supported; supported are safetensors "
        "and GGUF: convert it (in transformers: load the model and save_pretrained it) or choose another revision"
    )


def _open_gguf(path: Path) -> ModelSource:
    file = GgufFile(path)
    shapes = {name: header.shape for name, header in file.tensors.items()}
    try:
        config = config_from_gguf(file.metadata, shapes)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    weights = WeightSource(file, family_of(config).parts(config, True))
    check_tensors(weights.parts, file, config.architecture)
    config = _with_dtype(config, file)
    tokenizer = {key: _plain(file.metadata[key]) for key in file.metadata if key.startswith(_TOKENIZER_KEYS)}
    return ModelSource(
        path=path,
        config=config,
        digest=_digest(config, file),
        tokenizer_source=TokenizerSource(gguf_metadata=tokenizer),
        generation=generation_from_gguf(file.metadata, config.vocab_size),
        weights=weights,
    )


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _with_dtype(config: Any, file: TensorFile) -> ModelConfig:
    """The config with what most numbers of the matrices are stored as; each family's own dataclass has that field."""
    count: Counter[str] = Counter()
    for header in file.tensors.values():
        if len(header.shape) >= 2:
            count[header.dtype] += math.prod(header.shape)
    found: ModelConfig = dataclasses.replace(config, dtype=count.most_common(1)[0][0])
    return found


def _digest(config: ModelConfig, file: TensorFile) -> str:
    digest = tensors_digest(file)
    digest.update(repr(config).encode())
    return digest.hexdigest()
