"""How the rows of a step go through a model's layers, for families whose layers are `ops.DecoderLayer`s.

It does not know embeddings, heads of the vocabulary, or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kernels.decoder_layer import finish_layer
from octavo.kernels.ops import F32, I32, DecoderLayer, DecoderRows, KVLayer, Ops
from octavo.models.step_rows import are_all_rows, one_row_each, weigh


def run_decoder(
    ops: Ops, layers: tuple[DecoderLayer, ...], kv_layers: Sequence[KVLayer], rows: DecoderRows, logits_rows: I32
) -> F32:
    """What the rows that become logits are after all layers: [n, hidden_size]. K and V of every row are written.

    rows: embedded, of one step; logits_rows [n] indices into them, each once. The result may be `rows.hidden` itself.
    """
    assert len(layers) == len(kv_layers)
    last, batch = len(layers) - 1, rows.batch
    are_all = are_all_rows(logits_rows, len(rows.hidden))
    at_once = len(layers) if are_all else last
    if batch.weighed or batch.heard is not None:  # somebody looks at the queries of each layer
        at_once = 0
    if at_once:
        ops.decoder_layers(layers, kv_layers, at_once, rows)
    for index in range(at_once, len(layers)):
        layer, kv = layers[index], kv_layers[index]
        ops.attention_input(rows.hidden, layer.attention, batch, rows.ropes[layer.rope], kv, rows.q)
        weigh(ops, rows.q, batch, kv, layer.scale, index)
        if index == last and not are_all:
            # K and V are written for every row; past this point only rows that become logits are needed.
            hidden, q = rows.hidden[logits_rows], rows.q[logits_rows]
            rows = DecoderRows(hidden, one_row_each(batch, logits_rows), rows.ropes, q, rows.attended[: len(q)])
        if len(rows.hidden):
            finish_layer(ops, layer, kv, rows)
    return rows.hidden
