"""A turn of heads that spreads what is large in one channel over all of them: the Walsh-Hadamard transform.

K and q turned alike have the same products, and V turned has sums that turn back. All numbers of a turned vector are of
one size, so a scale for the whole vector wastes little (QuaRot, 2024). The matrix is its own inverse. It does not know
tiles or scales.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]

# Formats whose heads are turned always, but for latents. Of int4, V alone: its K has scales of channels over a tile,
# which a turn would make alike.
TURNED_FORMATS = ("int8", "k8v4", "int4")


def turn(x: F32) -> F32:
    """x [..., head_dim], turned in blocks of the largest power of two that divides head_dim, block by block.

    Sums and differences of neighbours, then of neighbours two apart, four, and so on; at the end each number is
    multiplied by 1 / sqrt(size of a block). The kernels do the same operations, so they give the same bits.
    """
    head_dim = x.shape[-1]
    size, found = head_dim & -head_dim, np.ascontiguousarray(x, np.float32)
    step = 1
    while step < size:
        pairs = found.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        with np.errstate(over="ignore", invalid="ignore"):
            found = np.stack([first + second, first - second], axis=-2)
        step *= 2
    with np.errstate(invalid="ignore"):
        return np.asarray(found.reshape(x.shape) * np.float32(size**-0.5), np.float32)
