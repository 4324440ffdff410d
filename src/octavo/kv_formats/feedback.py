"""Rounding the numbers of K one after the other, so that later ones make up for the errors of those before.

What an error costs depends on the queries: where they have large numbers together, errors can take each other away. How
much of a number's error each later one takes over was found from the queries of a text (as LDLQ does for weights in
QuIP, 2023), and is a matrix for each KV head. It does not know how that is found, nor tiles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.kv_formats.small_float import E4M3, E5M2, SmallFloat

F32 = npt.NDArray[np.float32]

FLOATS: dict[str, SmallFloat] = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}  # the formats that may have it


def compensate(x: F32, feedback: F32, form: SmallFloat) -> F32:
    """x [num_kv_heads, head_dim] -> numbers that the format holds exactly; feedback [num_kv_heads, head_dim, head_dim].

    Number j is rounded, and its error times feedback[j] is taken from the numbers behind it. The kernels do the same
    operations, so they give the same bits.
    """
    rest, rounded = x.astype(np.float32), np.empty(x.shape, np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        for j in range(x.shape[-1]):
            rounded[:, j] = form.decode(form.encode(rest[:, j]))
            error = rounded[:, j] - x[:, j]
            rest[:, j + 1 :] -= error[:, None] * feedback[:, j, j + 1 :]
    return rounded
