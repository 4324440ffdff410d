"""A decoder layer out of single operations: the meaning of `Ops.decoder_layers`, and how a watched step runs.

It does not know models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.kernels.ops import DecoderLayer, DecoderRows, KVLayer, Ops


def run_layers(
    ops: Ops, layers: Sequence[DecoderLayer], kv_layers: Sequence[KVLayer], count: int, rows: DecoderRows
) -> None:
    """As `Ops.decoder_layers`, and fit to be that method of a class."""
    assert count <= len(layers) == len(kv_layers)
    for layer, kv in zip(layers[:count], kv_layers[:count], strict=True):
        ops.attention_input(rows.hidden, layer.attention, rows.batch, rows.ropes[layer.rope], kv, rows.heads)
        finish_layer(ops, layer, kv, rows)


def finish_layer(ops: Ops, layer: DecoderLayer, kv: KVLayer, rows: DecoderRows) -> None:
    """What comes behind `attention_input`: attention and MLP are added to the hidden state."""
    hidden, eps, heads = rows.hidden, layer.attention.eps, rows.heads
    window, softcap = layer.window, layer.softcap
    ops.paged_attention(heads, rows.batch, kv, layer.scale, heads, window=window, softcap=softcap)
    flat = heads.reshape(len(hidden), -1)
    if layer.post_attention_norm is None:
        ops.linear(flat, layer.output, hidden, accumulate=True)
    else:
        added = np.empty_like(hidden)
        ops.linear(flat, layer.output, added)
        ops.rms_norm(added, layer.post_attention_norm, eps, hidden, accumulate=True)
    post_norm = layer.post_mlp_norm
    ops.gated_mlp(hidden, layer.mlp_norm, eps, layer.gate_up, layer.down, gate=layer.gate, post_norm=post_norm)
