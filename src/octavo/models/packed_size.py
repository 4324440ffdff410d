"""How many bytes the kernels hold weights in, as pure arithmetic: what is checked before loading, and planned.

Standard library only. A matrix lies in panels of 16 outputs; int8 and int4 have an f32 scale (or two f16 numbers, and
then a f32 number for each output) for each 32 inputs of an output. It knows no layout beyond these sizes.
"""

from __future__ import annotations

from octavo.errors import ConfigError

WEIGHTS_DTYPES = ("f32", "bf16", "int8", "int4")  # that the kernels hold
EXACT_IN_INT8 = ("q8_0", "q4_0", "q4_1")  # GGUF blocks that int8 holds without rounding again
_FOUR_BITS = ("q4_0", "q4_1")
_LANES, _GROUP = 16, 32
_GROUP_BYTES = {"int8": 36, "int4": 20}
_F32 = 4


def resolve_weights_dtype(asked: str, stored: str) -> str:
    """The dtype in which the kernels hold the weights of a model whose matrices are stored so: one of WEIGHTS_DTYPES.

    auto is f32 for f32, int8 for what int8 holds exactly (then only activations are rounded: 0.0014 nats), else bf16.
    """
    if asked in WEIGHTS_DTYPES:
        return asked
    if asked != "auto":
        raise ConfigError(f"--weights-dtype {asked!r} is not one of auto, {', '.join(WEIGHTS_DTYPES)}")
    if stored in EXACT_IN_INT8:
        return "int8"
    return "f32" if stored == "f32" else "bf16"


def bits_of(weights_dtype: str) -> int:
    """Of one weight, its share of the scales with it, where nothing is padded."""
    if weights_dtype in _GROUP_BYTES:
        return 8 * _GROUP_BYTES[weights_dtype] // _GROUP
    return 16 if weights_dtype == "bf16" else 32


def packed_bytes(
    shape: tuple[int, ...], weights_dtype: str, stored: str = "", *, is_of_vocabulary: bool = False
) -> int:
    """Of one matrix [outputs, inputs], or of a vector, which is kept in f32.

    `stored`: how the file has it; blocks of four bits stay what they are. `is_of_vocabulary`: the embedding or the
    head, which int4 keeps in int8.
    """
    if len(shape) != 2:
        count = 1
        for size in shape:
            count *= size
        return _F32 * count
    outputs, inputs = -(-shape[0] // _LANES) * _LANES, shape[1]
    held = "int8" if weights_dtype == "int4" and is_of_vocabulary else weights_dtype
    if held in _GROUP_BYTES:
        group_bytes = _GROUP_BYTES["int4" if stored in _FOUR_BITS else held]
        unit_of_minima = _F32 if stored == "q4_1" else 0
        return outputs * (-(-inputs // _GROUP) * group_bytes + unit_of_minima)
    if held == "bf16":
        return outputs * (inputs + inputs % 2) * 2
    return outputs * inputs * _F32
