"""Which layers look at a window of tokens only: the ways in which configs say so.

It does not know what such layers are made of.
"""

from __future__ import annotations

from octavo.planner.draft import Draft

LOCAL = ("sliding_attention", "sliding", "sliding_window", "local", "local_attention")
CHUNKED = ("chunked_attention",)


def layers_of_types(
    draft: Draft, every: int, *, window_key: str = "sliding_window"
) -> tuple[tuple[int, ...], int | None]:
    """The layers with a window, and the window: by `layer_types`, else all but each `every`-th (the last of a run).

    A pattern of the config (`sliding_window_pattern`: a number, or letters such as LLLG) goes before `every`.
    """
    fields = draft.fields
    window = fields.get(window_key)
    window = None if window is None else fields.integer(window_key, least=0) or None
    types = fields.per_layer("layer_types", draft.num_layers)
    if types is not None:
        found = [layer for layer in draft.layers if types[layer] in LOCAL]
    else:
        pattern = fields.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern:
            found = [layer for layer in draft.layers if pattern[layer % len(pattern)] == "L"]
        else:
            period = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", every))
            found = [layer for layer in draft.layers if period > 1 and (layer + 1) % period]
    return (tuple(found), window) if window is not None else ((), None)


def window_layers(draft: Draft) -> tuple[tuple[int, ...], int | None]:
    """Qwen: only with `use_sliding_window`, and from layer `max_window_layers` on."""
    fields = draft.fields
    if not fields.flag("use_sliding_window") or not fields.has("sliding_window"):
        return (), None
    window = fields.integer("sliding_window")
    types = fields.per_layer("layer_types", draft.num_layers)
    if types is not None:
        return tuple(layer for layer in draft.layers if types[layer] in LOCAL), window
    first = fields.integer("max_window_layers", draft.num_layers, least=0)
    return tuple(layer for layer in draft.layers if layer >= first), window
