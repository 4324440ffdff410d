"""Layers -> groups: blocks of equal bytes, every layer once, padding where it must be and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.kv_groups import (
    MAX_GROWING_PADDING,
    MAX_WINDOW_PADDING,
    LayerGeometry,
    Pieces,
    build_groups,
    choose_size,
    format_words,
    layers_of,
    with_formats,
)
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import ConfigError

GEOMETRIES = st.builds(
    LayerGeometry,
    st.integers(1, 8),
    st.sampled_from([16, 64, 128, 256]),
    st.sampled_from(["f32", "bf16", "bf16", "int4"]),
    st.sampled_from([None, 128, 512]),
).filter(lambda one: one.kv_format != "int4" or one.head_dim % 32 == 0)


@given(st.lists(GEOMETRIES, min_size=1, max_size=3).flatmap(lambda kinds: st.lists(st.sampled_from(kinds), min_size=1)))
@settings(max_examples=200, deadline=None)
def test_every_layer_once_in_blocks_of_equal_bytes(layers: list[LayerGeometry]) -> None:
    groups = build_groups(layers)
    spec = KVSpec(groups, 16)  # refuses blocks of different bytes
    tails = [group for group in groups if group.kind == "tail"]
    assert groups[len(groups) - len(tails) :] == tuple(tails), "tails come last"
    in_tails = sorted(index for group in tails for index in group.layer_indices)
    assert in_tails == [index for index, layer in enumerate(layers) if layer.kv_format == "int4"]
    for group in tails:
        assert (group.kv_format, group.num_blocks_behind(16)) == ("bf16", 0)
        assert group.layer_bytes_per_token == 2 * group.num_kv_heads * group.head_dim
    every, groups = groups, groups[: len(groups) - len(tails)]
    assert sorted(index for group in groups for index in group.layer_indices) == list(range(len(layers)))
    assert len({group.name for group in every}) == len(every)
    for group in groups:
        assert list(group.layer_indices) == sorted(group.layer_indices)
        assert group.padding_bytes_per_token >= 0
        for index in group.layer_indices:
            layer = layers[index]
            assert (group.num_kv_heads, group.head_dim, group.kv_format, group.window, group.kind) == (
                layer.num_kv_heads,
                layer.head_dim,
                layer.kv_format,
                layer.window,
                layer.kind,
            )
    lives = [group.window is not None for group in groups]
    assert lives == sorted(lives), "those that keep all tokens come first"
    whole = sum(group.bytes_per_token + group.padding_bytes_per_token for group in every) * 16
    used = spec.bytes_per_token + sum(group.bytes_per_token for group in tails)
    assert whole - used * 16 == spec.padding_bytes_per_block
    assert build_groups(layers) == every


def pattern(full: int, window: int, *, shape: tuple[int, int] = (1, 256)) -> list[LayerGeometry]:
    return [LayerGeometry(*shape, "bf16")] * full + [LayerGeometry(*shape, "bf16", 1024)] * window


@pytest.mark.parametrize(
    ("model", "full", "window", "sizes", "padding_layers"),
    [
        ("Llama-2-7B", 32, 0, [32], 0),
        ("Mistral-7B", 0, 32, [32], 0),
        ("Gemma 2 2B, gpt-oss", 13, 13, [13, 13], 0),
        ("Gemma 3 270M", 3, 15, [3] * 6, 0),
        ("Gemma 3 1B", 4, 22, [4, 3, 4, 4, 3, 4, 4], 2),
        ("Gemma 3 4B", 5, 29, [5, 4, 5, 5, 5, 5, 5], 1),
        ("Gemma 3 12B", 8, 40, [8] * 6, 0),
        ("Gemma 3 27B", 10, 52, [10, 8, 9, 9, 8, 9, 9], 8),
    ],
)
def test_groups_of_real_models(model: str, full: int, window: int, sizes: list[int], padding_layers: int) -> None:
    groups = build_groups(pattern(full, window))
    assert [len(group.layer_indices) for group in groups] == sizes
    layer = groups[0].layer_bytes_per_token
    assert sum(group.padding_bytes_per_token for group in groups) == padding_layers * layer


def test_a_model_of_one_kind_has_one_group_with_the_name_that_it_always_had() -> None:
    layers = [LayerGeometry(3, 64, "bf16")] * 30
    assert build_groups(layers) == (KVGroupSpec("full", tuple(range(30)), 3, 64, "bf16"),)


def test_latents_count_once() -> None:
    """DeepSeek-V2: 512 + 64 numbers a token and layer, and nothing else."""
    (group,) = build_groups([LayerGeometry(1, 512 + 64, "bf16", kind="latent")] * 60)
    assert (group.name, group.bytes_per_token, group.padding_bytes_per_token) == ("latent", 60 * 576 * 2, 0)


def test_layers_of_different_sizes_share_a_pool() -> None:
    """Full layers with twice the bytes of window layers: half as many in a block, no padding."""
    layers = [LayerGeometry(2, 128, "bf16"), *[LayerGeometry(1, 128, "bf16", 512)] * 2] * 4
    groups = build_groups(layers)
    assert [(group.name, len(group.layer_indices)) for group in groups] == [("full", 4), ("window512", 8)]
    assert not any(group.padding_bytes_per_token for group in groups)


def test_padding_that_cannot_be_helped_is_planned_and_shown() -> None:
    layers = [LayerGeometry(1, 48, "bf16"), LayerGeometry(1, 64, "bf16", 128)]
    full, window = build_groups(layers)
    assert (full.padding_bytes_per_token, window.padding_bytes_per_token) == (2 * 16 * 2, 0)
    spec = KVSpec((full, window), 16)
    assert spec.padding_bytes_per_block == 16 * 64
    assert spec.pool_bytes(2) == 2 * 16 * 256
    assert spec.growing_bytes_per_token == 256
    assert spec.bytes_per_token == 2 * 48 * 2 + 256


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_layers_of_one_shape_need_little_padding(full: int, window: int) -> None:
    groups = build_groups(pattern(full, window))
    for share, is_window in ((MAX_GROWING_PADDING, False), (MAX_WINDOW_PADDING, True)):
        of_life = [group for group in groups if (group.window is not None) is is_window]
        padding = sum(group.padding_bytes_per_token for group in of_life)
        assert padding <= share * (padding + sum(group.bytes_per_token for group in of_life))


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        build_groups([])


@given(
    st.lists(GEOMETRIES, min_size=1, max_size=12), st.dictionaries(st.integers(0, 11), st.sampled_from(["int8", "f16"]))
)
@settings(max_examples=200, deadline=None)
def test_some_layers_in_another_format(layers: list[LayerGeometry], formats: dict[int, str]) -> None:
    """Each layer as it was, but for its format; blocks of all groups have the same number of bytes, padding and all."""
    groups = with_formats(build_groups(layers), formats)
    wanted = [replace(layer, kv_format=formats.get(index, layer.kv_format)) for index, layer in enumerate(layers)]
    assert layers_of(groups) == wanted
    spec = KVSpec(groups, 16)
    used = sum(group.bytes_per_token for group in groups)
    assert spec.bytes_per_block * len(groups) == 16 * used + spec.padding_bytes_per_block


def test_formats_have_one_name_together() -> None:
    groups = build_groups([LayerGeometry(3, 64, "int8")] * 9)
    assert format_words(groups) == "int8"
    assert format_words(with_formats(groups, dict.fromkeys((0, 1, 2, 7), "bf16"))) == "int8 (bf16 in layers 0-2,7)"
    assert format_words(with_formats(groups, {0: "f32", 4: "bf16"})) == "int8 (bf16 in layers 4, f32 in layers 0)"
    assert format_words(with_formats(groups, dict.fromkeys(range(9), "f16"))) == "f16"


def test_a_size_serves_pieces_of_any_kind() -> None:
    """What the planner cuts by the same rule: bytes of a block instead of a token change nothing but the scale."""
    for scale in (1, 16):
        assert choose_size([Pieces(100 * scale, 6, is_bounded=False)]) == 600 * scale
        alike = [Pieces(100 * scale, 3, is_bounded=False), Pieces(100 * scale, 15, is_bounded=True)]
        assert choose_size(alike) == 300 * scale, "one group of full layers, five of windows"
        assert (
            choose_size([Pieces(96 * scale, 2, is_bounded=False), Pieces(100 * scale, 1, is_bounded=True)])
            == 192 * scale
        )
    tail = Pieces(40, 6, is_bounded=True, is_counted=False)
    assert choose_size([Pieces(100, 6, is_bounded=False), tail]) == 600, "what the tail leaves unused does not matter"
    assert choose_size([Pieces(100, 6, is_bounded=False), Pieces(40, 6, is_bounded=True)]) == 300


def test_int4_takes_about_a_third_and_has_a_tail() -> None:
    """SmolLM2-135M: 84 bytes a token and head instead of 256; keys of the block that fills in two blocks a sequence."""
    groups = build_groups([LayerGeometry(3, 64, "int4")] * 30)
    spec = KVSpec(groups, 16)
    assert [(group.name, group.kind, len(group.layer_indices)) for group in groups] == [
        ("full", "pair", 30),
        ("tail/1", "tail", 15),
        ("tail/2", "tail", 15),
    ]
    assert spec.bytes_per_token == 30 * 3 * 84
    assert spec.bytes_per_block == 16 * 30 * 3 * 84
    assert spec.blocks_for_tokens(1000) == 63 + 2
    assert spec.blocks_for_tokens(1000, 512) == 63 + 2 * 33
    assert "quantises keys by whole tiles (KV format int4)" in (spec.why_all_are_kept or "")


def test_a_tail_needs_a_window() -> None:
    with pytest.raises(ConfigError, match="tail without a window"):
        KVGroupSpec("tail", (0,), 1, 32, "bf16", kind="tail")
