"""How the rows of a step go through a model's layers, for families whose layers are `ops.DecoderLayer`s.

It does not know embeddings, heads of the vocabulary, or requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.kernels.decoder_layer import finish_layer
from octavo.kernels.ops import F32, I32, DecoderLayer, DecoderRows, KVLayer, Ops
from octavo.models.step_rows import Scratch, are_all_rows, one_row_each, weigh


class DecoderScratch:
    """What the rows of a step are held in between layers, kept from one step to the next."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        self._heads = num_heads, head_dim
        self._sizes = {"hidden": hidden_size, "heads": num_heads * head_dim}
        self._scratch = Scratch()

    def take(self, num_rows: int) -> tuple[F32, F32]:
        """As in `DecoderRows`: hidden and heads, with whatever was in them."""
        hidden, heads = (self._scratch.rows(name, num_rows, size) for name, size in self._sizes.items())
        return hidden, heads.reshape(num_rows, *self._heads)

    def prepare(self, num_rows: int) -> bool:
        """Between steps: has a little more of the memory of a step of so many rows ready; whether there was any."""
        return any(self._scratch.prepare(name, num_rows, size) for name, size in self._sizes.items())


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
        ops.attention_input(rows.hidden, layer.attention, batch, rows.ropes[layer.rope], kv, rows.heads)
        weigh(ops, rows.heads, batch, kv, layer.scale, index)
        if index == last and not are_all:
            # K and V are written for every row; past this point only rows that become logits are needed.
            hidden, heads = rows.hidden[logits_rows], rows.heads[logits_rows]
            rows = DecoderRows(hidden, one_row_each(batch, logits_rows), rows.ropes, heads)
        if len(rows.hidden):
            finish_layer(ops, layer, kv, rows)
    return rows.hidden
