"""How many bytes a KV format takes: data and arithmetic. What the bytes mean is in `kv_formats`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VectorBytes:
    """One token's K or V of one head (or its latent)."""

    bits: int  # of a number
    extra_bytes: int = 0  # scale and minimum of the token

    def of(self, head_dim: int) -> int:
        assert self.bits * head_dim % 8 == 0
        return self.bits * head_dim // 8 + self.extra_bytes


TILE_TOKENS = 16  # that are stored together, in every format


@dataclass(frozen=True, slots=True)
class FormatBytes:
    k: VectorBytes
    v: VectorBytes
    dim_step: int = 16  # head_dim must be a multiple
    # Where K is quantised by whole tiles: how K of a tile that is not full yet is kept, beside it. Rows read K of their
    # own tile there, full or not, so that it does not matter when it fills.
    tail_format: str | None = None


FORMAT_BYTES: dict[str, FormatBytes] = {
    "f32": FormatBytes(VectorBytes(32), VectorBytes(32)),
    "bf16": FormatBytes(VectorBytes(16), VectorBytes(16)),
    "f16": FormatBytes(VectorBytes(16), VectorBytes(16)),
    "fp8_e4m3": FormatBytes(VectorBytes(8), VectorBytes(8)),
    "fp8_e5m2": FormatBytes(VectorBytes(8), VectorBytes(8)),
    "int8": FormatBytes(VectorBytes(8, 2), VectorBytes(8, 2)),
    "k8v4": FormatBytes(VectorBytes(8, 2), VectorBytes(4, 4), dim_step=32),
    # K: a tile has 16 codes of 4 bits, a scale and a minimum of 2 bytes for each channel
    "int4": FormatBytes(VectorBytes(6), VectorBytes(4, 4), dim_step=32, tail_format="bf16"),
}


def format_bytes(kv_format: str, head_dim: int) -> FormatBytes:
    """The bytes of a format, which must be able to hold heads of this size."""
    if kv_format not in FORMAT_BYTES:
        known = ", ".join(FORMAT_BYTES)
        raise ConfigError(f"KV format {kv_format!r} is not one of {known}; choose one with --kv-cache-dtype")
    found = FORMAT_BYTES[kv_format]
    if head_dim % found.dim_step:
        raise ConfigError(
            f"KV format {kv_format} holds heads of a multiple of {found.dim_step} numbers, and this model's have "
            f"{head_dim}; choose another with --kv-cache-dtype"
        )
    return found


def vector_bytes(kv_format: str, head_dim: int, kind: str = "pair") -> int:
    """Bytes of K and V of one token of one head; of kind "latent", of its one vector; of kind "tail", of K."""
    if kind == "latent" and kv_format in FORMAT_BYTES and FORMAT_BYTES[kv_format].tail_format is not None:
        raise ConfigError(
            f"KV format {kv_format} keeps keys and values apart, and this model's latents are both; choose int8, or "
            "another with --kv-cache-dtype"
        )
    found = format_bytes(kv_format, head_dim)
    return found.k.of(head_dim) + (found.v.of(head_dim) if kind == "pair" else 0)
