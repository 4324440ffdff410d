"""Layers of a model -> KV groups whose blocks have the same number of bytes, so that one pool serves all. Pure.

It knows the geometry of each layer; it does not know models, budgets or requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from octavo.core.kv_bytes import FORMAT_BYTES, TILE_TOKENS
from octavo.core.kv_spec import KVGroupSpec
from octavo.errors import ConfigError

# So much of the bytes may be unused where fewer groups can be had for it: what layers that keep all tokens take is most
# of the memory of long texts, what window layers take is bounded.
MAX_GROWING_PADDING = 1 / 32
MAX_WINDOW_PADDING = 1 / 6


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """What one layer keeps of a token, and for how long."""

    num_kv_heads: int
    head_dim: int
    kv_format: str
    window: int | None = None  # tokens that a row reads, itself included; None: all
    kind: str = "pair"  # as in `KVGroupSpec`


@dataclass(frozen=True, slots=True)
class Pieces:
    """What goes into blocks whole, and is alike: mostly the layers of one geometry."""

    num_bytes: int  # of one of them, for a token or for a block: the same for all
    count: int
    is_bounded: bool  # a sequence takes no more of it, however long it is: layers with a window
    is_counted: bool = True  # whether it matters what they leave unused; not of what a sequence has one block of

    def num_groups(self, size: int) -> int:
        """Groups that they are split over, where a block has so many bytes."""
        return -(-self.count // (size // self.num_bytes))


def build_groups(layers: Sequence[LayerGeometry]) -> tuple[KVGroupSpec, ...]:
    """The groups of a model's layers, in the order of the model; those that keep all tokens come first, tails last.

    A block has room for as many layers of each geometry as its bytes take; layers of one geometry that do not fit one
    block are split evenly over several groups. Of the sizes of a block that leave no more unused than is said above,
    the one with the fewest groups is taken (each step works on every group), then the one with the least padding; if
    there is none, the least padding decides, of layers that keep all tokens first. Padding of tails does not count: a
    sequence has one block of them.
    """
    if not layers:
        raise ConfigError("a model needs at least one layer to make KV groups of")
    by_geometry: dict[LayerGeometry, list[int]] = {}
    for index, layer in enumerate(layers):
        by_geometry.setdefault(layer, []).append(index)
        tail_format = FORMAT_BYTES[layer.kv_format].tail_format if layer.kv_format in FORMAT_BYTES else None
        if tail_format is not None and layer.kind == "pair":
            tail = replace(layer, kv_format=tail_format, window=TILE_TOKENS, kind="tail")
            by_geometry.setdefault(tail, []).append(index)
    pieces = [
        Pieces(_layer_bytes(layer), len(indices), layer.window is not None, layer.kind != "tail")
        for layer, indices in by_geometry.items()
    ]
    return _groups_of(by_geometry, choose_size(pieces))


def choose_size(pieces: Sequence[Pieces]) -> int:
    """The bytes of a block that holds pieces of one kind each time, as `build_groups` says."""
    least = max(one.num_bytes for one in pieces)
    sizes = sorted({one.num_bytes * count for one in pieces for count in range(1, one.count + 1)})
    cuts = [
        (_padding(pieces, size), sum(one.num_groups(size) for one in pieces), size) for size in sizes if size >= least
    ]
    thrifty = [cut for cut in cuts if cut[0][0] <= MAX_GROWING_PADDING and cut[0][1] <= MAX_WINDOW_PADDING]
    if thrifty:
        return min(thrifty, key=lambda cut: (cut[1], cut[0], cut[2]))[2]
    return min(cuts)[2]


def _padding(pieces: Sequence[Pieces], size: int) -> tuple[float, float]:
    """The unused share of what is not bounded, and of what is."""
    counted = [one for one in pieces if one.is_counted]
    growing, bounded = ([one for one in counted if one.is_bounded == side] for side in (False, True))
    return _unused(growing, size), _unused(bounded, size)


def _unused(pieces: Sequence[Pieces], size: int) -> float:
    whole = size * sum(one.num_groups(size) for one in pieces)
    return (whole - sum(one.num_bytes * one.count for one in pieces)) / whole if whole else 0.0


def with_formats(groups: Sequence[KVGroupSpec], formats: Mapping[int, str]) -> tuple[KVGroupSpec, ...]:
    """The groups of the same layers when those of `formats` (index -> KV format) are kept in another one."""
    layers = layers_of(groups)
    return build_groups([replace(one, kv_format=formats.get(i, one.kv_format)) for i, one in enumerate(layers)])


def layers_of(groups: Iterable[KVGroupSpec]) -> list[LayerGeometry]:
    """The layers that such groups were made of, in the order of the model."""
    found = {
        index: LayerGeometry(one.num_kv_heads, one.head_dim, one.kv_format, one.window, one.kind)
        for one in groups
        for index in one.layer_indices
        if one.kind != "tail"
    }
    return [found[index] for index in range(len(found))]


def format_words(groups: Iterable[KVGroupSpec]) -> str:
    """In what the layers are kept, as one name: `int8`, or `int8 (bf16 in layers 0-3,7)`."""
    formats = [layer.kv_format for layer in layers_of(groups)]
    most, *others = sorted(set(formats), key=lambda name: (-Counter(formats)[name], name))
    each = [f"{name} in layers {ranges([i for i, one in enumerate(formats) if one == name])}" for name in others]
    return f"{most} ({', '.join(each)})" if each else most


def ranges(indices: Sequence[int]) -> str:
    """Ascending numbers as people write them: 0-3,7."""
    starts = [i for i in indices if i - 1 not in indices]
    ends = [i for i in indices if i + 1 not in indices]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _groups_of(by_geometry: dict[LayerGeometry, list[int]], size: int) -> tuple[KVGroupSpec, ...]:
    """Groups with `size` bytes a token."""
    groups: list[KVGroupSpec] = []
    names = _names(list(by_geometry))
    for layer, indices in sorted(by_geometry.items(), key=lambda item: (_life(item[0]), item[1][0])):
        room = size // _layer_bytes(layer)
        count = -(-len(indices) // room)
        for part in range(count):
            own = tuple(indices[part * len(indices) // count : (part + 1) * len(indices) // count])
            name = names[layer] if count == 1 else f"{names[layer]}/{part + 1}"
            padding = size - len(own) * _layer_bytes(layer)
            about = (layer.num_kv_heads, layer.head_dim, layer.kv_format, layer.window, layer.kind, padding)
            groups.append(KVGroupSpec(name, own, *about))
    return tuple(groups)


def _life(layer: LayerGeometry) -> int:
    return 2 if layer.kind == "tail" else int(layer.window is not None)


def _names(geometries: Sequence[LayerGeometry]) -> dict[LayerGeometry, str]:
    """A name for each: its kind and window; with its shape where that is not enough to tell it from another."""
    plain = {one: _plain_name(one) for one in geometries}
    named = list(plain.values())
    return {
        one: name if named.count(name) == 1 else f"{name}-{one.num_kv_heads}x{one.head_dim}-{one.kv_format}"
        for one, name in plain.items()
    }


def _plain_name(layer: LayerGeometry) -> str:
    life = "full" if layer.window is None else f"window{layer.window}"
    if layer.kind == "pair":
        return life
    if layer.kind == "tail":
        return "tail"
    return layer.kind if layer.window is None else f"{layer.kind}-{life}"


def _layer_bytes(layer: LayerGeometry) -> int:
    one = KVGroupSpec("one layer", (0,), layer.num_kv_heads, layer.head_dim, layer.kv_format, layer.window, layer.kind)
    return one.layer_bytes_per_token
