"""The file of scales: the same numbers after a round trip; whatever is damaged, foreign or stale is refused by name."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from octavo.core.block_key import BlockKeyChain
from octavo.core.kv_bytes import FORMAT_BYTES
from octavo.core.kv_groups import LayerGeometry, build_groups
from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import ConfigError
from octavo.executor.config import SCALE_SCHEMES, ExecutorConfig
from octavo.executor.kv_scales import KVScales, default_scales_path, read_scales, write_scales
from octavo.executor.kv_setting import KVSetting, Running, kv_setting
from octavo.executor.kv_storage import KVStorage
from octavo.kernels.reference import ReferenceOps
from octavo.models.packed_size import WEIGHTS_DTYPES

MODEL = "a" * 64
CURE = r"octavo calibrate MODEL --text FILE --format fp8_e4m3"


def make_scales(num_layers: int = 2, scheme: str = "channel", seed: int = 0) -> KVScales:
    shape = (2, num_layers, 2, 16)
    k, v = np.exp(np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)
    if scheme == "head":
        k, v = np.repeat(k[..., :1], 16, axis=2), np.repeat(v[..., :1], 16, axis=2)
    feedback = np.triu(np.random.default_rng(seed).standard_normal((num_layers, 2, 16, 16)), 1).astype(np.float32)
    parts = (tuple(np.log(k)), tuple(feedback)) if scheme == "hadamard" else ((), ())
    return KVScales("fp8_e4m3", scheme, tuple(k), tuple(v), *parts, MODEL, "b" * 64, 123, "1.2.3")


def _parts(scales: KVScales) -> list[np.ndarray]:
    return [*scales.k, *scales.v, *scales.k_means, *scales.k_feedback]


@pytest.mark.parametrize("scheme", SCALE_SCHEMES)
def test_a_round_trip_keeps_every_number(tmp_path: Path, scheme: str) -> None:
    made, path = make_scales(scheme=scheme), tmp_path / "scales.safetensors"
    write_scales(path, made)
    found = read_scales(path, "fp8_e4m3", MODEL)
    assert found.digest == made.digest
    assert (found.scheme, found.model_digest, found.text_digest) == (scheme, MODEL, "b" * 64)
    assert (found.num_tokens, found.octavo_version, found.file_name) == (123, "1.2.3", path.name)
    for part, expected in zip(_parts(found), _parts(made), strict=True):
        assert np.array_equal(part, expected)
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays"


def test_beside_a_file_and_in_a_directory(tmp_path: Path) -> None:
    assert default_scales_path(tmp_path, "fp8_e5m2") == tmp_path / "kv-scales.fp8_e5m2.safetensors"
    beside = default_scales_path(tmp_path / "m.gguf", "fp8_e4m3")
    assert beside == tmp_path / "m.gguf.kv-scales.fp8_e4m3.safetensors"


def _swapped(path: Path, change: Callable[[dict[str, str], dict[str, np.ndarray]], None]) -> None:
    """The file with other metadata or tensors, and a header that is right."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    about, tensors = header.pop("__metadata__"), {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        raw = data[8 + length + start : 8 + length + end]
        tensors[name] = np.frombuffer(raw, np.float32).reshape(entry["shape"]).copy()
    change(about, tensors)
    path.write_bytes(save(tensors, about))


def _set(key: str, value: str) -> Callable[[dict[str, str], dict[str, np.ndarray]], None]:
    return lambda about, _: about.update({key: value})


def _number(value: float) -> Callable[[dict[str, str], dict[str, np.ndarray]], None]:
    def change(_: dict[str, str], tensors: dict[str, np.ndarray]) -> None:
        tensors["layers.1.v_scales"][0, 3] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("kind", "something else"), "does not say that it is"),
        (_set("kind", "octavo kv scales 1"), r"are of an older form \('octavo kv scales 1'\)"),
        (_set("scheme", "hadamard"), "layers.0.k_feedback is missing"),
        (_set("format", "fp8_e5m2"), "has scales for fp8_e5m2, not for fp8_e4m3"),
        (_set("model_digest", "c" * 64), r"another model \(digest cccccccccccc, and this one's is aaaaaaaaaaaa\)"),
        (_set("scheme", "token"), "scheme 'token'"),
        (_set("tokens", "-3"), "'-3' tokens"),
        (_set("digest", "d" * 64), "not those of its digest"),
        (lambda about, _: about.pop("digest"), "does not say that it is"),
        (_number(0.0), "layers.1.v_scales has a scale that is not finite and above 0"),
        (_number(-1.0), "not finite and above 0"),
        (_number(float("nan")), "not finite and above 0"),
        (_number(float("inf")), "not finite and above 0"),
        (_number(1.5), "not those of its digest"),
        (lambda _, tensors: tensors.pop("layers.0.k_scales"), "layers.0.k_scales is missing"),
        (lambda _, t: t.update({"layers.0.k_scales": t["layers.0.k_scales"].astype(np.float64)}), "no matrix of f32"),
        (lambda _, t: t.update({"layers.0.k_scales": t["layers.0.k_scales"].reshape(-1)}), "no matrix of f32"),
    ],
)
def test_another_file_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, str], dict[str, np.ndarray]], None], message: str
) -> None:
    path = tmp_path / "scales.safetensors"
    write_scales(path, make_scales())
    _swapped(path, change)
    with pytest.raises(ConfigError, match=message) as caught:
        read_scales(path, "fp8_e4m3", MODEL)
    assert str(path) in str(caught.value)
    assert CURE in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t["layers.1.k_feedback"].__setitem__((0, 2, 9), np.nan),
            "not finite, or not above the diagonal",
        ),
        (
            lambda t: t["layers.1.k_feedback"].__setitem__((1, 9, 9), 1),
            "not finite, or not above the diagonal",
        ),
        (lambda t: t["layers.1.k_feedback"].__setitem__((1, 2, 9), 5), "not those of its digest"),
        (
            lambda t: t["layers.1.k_means"].__setitem__((1, 2), np.inf),
            "k_means has a number that is not finite",
        ),
        (lambda t: t["layers.1.k_means"].__setitem__((1, 2), 7), "not those of its digest"),
        (lambda t: t.pop("layers.1.k_means"), "not those of its digest|is missing"),
        (lambda t: t.pop("layers.0.k_feedback"), "not those of its digest|is missing"),
        (lambda t: t.update({"layers.0.k_feedback": t["layers.0.k_feedback"][0].copy()}), "is missing or no matrix"),
    ],
)
def test_damaged_means_and_feedback_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], None], message: str
) -> None:
    path = tmp_path / "scales.safetensors"
    write_scales(path, make_scales(scheme="hadamard"))
    _swapped(path, lambda _, tensors: change(tensors))
    with pytest.raises(ConfigError, match=message) as caught:
        read_scales(path, "fp8_e4m3", MODEL)
    assert str(path) in str(caught.value)
    assert CURE in str(caught.value)


def test_every_cut_and_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    write_scales(path, make_scales())
    whole = path.read_bytes()
    made = make_scales()
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=CURE):
            read_scales(path, "fp8_e4m3", MODEL)
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        with contextlib.suppress(ConfigError):  # else the byte is of what is only told of the scales
            assert read_scales(path, "fp8_e4m3", MODEL).digest == made.digest
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scales(tmp_path / "nowhere", "fp8_e4m3", MODEL)


def spec(kv_format: str, num_layers: int = 2, heads: int = 2, dim: int = 16) -> KVSpec:
    return KVSpec((KVGroupSpec("full", tuple(range(num_layers)), heads, dim, kv_format),), 16)


def test_a_cache_has_them_in_every_layer_and_refuses_others() -> None:
    scales = make_scales()
    storage = KVStorage(spec("fp8_e4m3"), 4, scales=scales)
    assert [layer.k_feedback for layer in storage.layers] == [None, None]
    assert [layer.k_scales is k for layer, k in zip(storage.layers, scales.k, strict=True)] == [True, True]
    assert [layer.v_scales is v for layer, v in zip(storage.layers, scales.v, strict=True)] == [True, True]
    for wrong in (spec("fp8_e4m3", num_layers=3), spec("fp8_e4m3", heads=1), spec("fp8_e4m3", dim=32)):
        with pytest.raises(ConfigError, match=CURE):
            KVStorage(wrong, 4, scales=scales)


def test_heads_are_turned_where_scheme_or_format_say_so() -> None:
    """Of int8, k8v4 and int4 always; latents never."""
    for scheme in SCALE_SCHEMES:
        storage = KVStorage(spec("fp8_e4m3"), 4, scales=make_scales(scheme=scheme))
        assert [layer.k_feedback is not None for layer in storage.layers] == 2 * [scheme == "hadamard"]
        assert [layer.k_means is not None for layer in storage.layers] == 2 * [scheme == "hadamard"]
        assert [layer.is_turned for layer in storage.layers] == 2 * [scheme == "hadamard"]
    for kv_format in FORMAT_BYTES:
        groups = build_groups([LayerGeometry(1, 32, kv_format)])
        (layer,) = KVStorage(KVSpec(groups, 16), 4).layers
        assert layer.is_turned == (kv_format in ("int8", "k8v4", "int4"))
        assert layer.tail is None or not layer.tail.is_turned
    latent = KVGroupSpec("latent", (0,), 1, 32, "int8", kind="latent")
    assert not KVStorage(KVSpec((latent,), 16), 4).layers[0].is_turned


def test_the_plan_counts_what_lies_beside_the_pool() -> None:
    """Law 2: as many bytes as the arrays of the layers have."""
    assert KVStorage(spec("fp8_e4m3"), 4).scales_bytes == 0
    for scheme in SCALE_SCHEMES:
        storage = KVStorage(spec("fp8_e4m3"), 4, scales=make_scales(scheme=scheme))
        arrays = [(layer.k_scales, layer.v_scales, layer.k_means, layer.k_feedback) for layer in storage.layers]
        assert storage.scales_bytes == sum(one.nbytes for layer in arrays for one in layer if one is not None)


def test_int8_has_scales_of_the_scheme_hadamard_alone(tmp_path: Path) -> None:
    path = tmp_path / "scales.safetensors"
    for scheme in SCALE_SCHEMES:
        write_scales(path, replace(make_scales(scheme=scheme), kv_format="int8", k_feedback=()))
        if scheme == "hadamard":
            assert read_scales(path, "int8", MODEL).is_turned
        else:
            with pytest.raises(ConfigError, match=f"scheme '{scheme}'"):
                read_scales(path, "int8", MODEL)


def test_layers_in_another_format_have_no_scales() -> None:
    groups = (
        KVGroupSpec("a", (0,), 2, 16, "fp8_e4m3", padding_bytes_per_token=64),
        KVGroupSpec("b", (1,), 2, 16, "bf16"),
    )
    layers = KVStorage(KVSpec(groups, 16), 4, scales=make_scales()).layers
    assert layers[0].k_scales is not None
    assert layers[1].k_scales is layers[1].v_scales is None


class _Model:
    digest = MODEL
    stored_dtype = "bf16"

    def __init__(self, path: Path) -> None:
        self.path = path


def test_scales_are_found_beside_the_model_or_asked_for_by_name(tmp_path: Path) -> None:
    model, running = _Model(tmp_path), Running(ReferenceOps(), "bf16", None, tmp_path)
    wanted = ExecutorConfig(kv_cache_dtype="fp8_e4m3")
    with pytest.raises(ConfigError, match=CURE + ".*, or run uncalibrated with --kv-cache-scales none"):
        kv_setting(wanted, model, running)
    plain = kv_setting(replace(wanted, kv_cache_scales="none"), model, running)
    assert plain.scales is None
    (told,) = plain.degraded(2048, None)
    assert told.startswith("kv_cache_dtype fp8_e4m3 is not calibrated, as --kv-cache-scales none asks")
    assert plain.as_object()["scales"] == "none"
    write_scales(default_scales_path(tmp_path, "fp8_e4m3"), make_scales())
    found = kv_setting(wanted, model, running)
    assert found.degraded(2048, None) == ()
    assert found.scales is not None
    assert "kv-scales.fp8_e4m3.safetensors (by channel, digest " in found.words()
    elsewhere = tmp_path / "others"
    write_scales(elsewhere, make_scales(seed=1))
    other = kv_setting(replace(wanted, kv_cache_scales=str(elsewhere)), model, running)
    assert other.scales is not None
    assert other.scales.digest != found.scales.digest
    with pytest.raises(ConfigError, match="goes with fp8_e4m3, fp8_e5m2, int8, and the KV cache is in bf16"):
        kv_setting(ExecutorConfig(kv_cache_scales="none"), model, running)
    assert kv_setting(ExecutorConfig(), model, running) == KVSetting("bf16")


@pytest.mark.parametrize("kv_format", ["int8", "k8v4", "int4"])
def test_blocks_of_before_heads_were_turned_are_others(kv_format: str) -> None:
    """F2: what such a cache on disk holds is read as something else now."""
    formats = f"{kv_format} (bf16 in layer 0)"
    weighed = ", keys weighed" if kv_format == "int8" else ""
    assert KVSetting(kv_format).key_name(formats, "bf16") == f"{formats}, turned{weighed}, weights bf16"
    assert KVSetting("bf16").key_name("bf16", "bf16") == "bf16, weights bf16"


def test_other_means_and_feedback_are_other_blocks() -> None:
    made = make_scales(scheme="hadamard")
    others = [replace(made, k_feedback=(made.k_feedback[0], made.k_feedback[1] * np.float32(2)))]
    others += [replace(made, k_means=means) for means in ((), (made.k_means[1], made.k_means[0]))]
    assert len({one.digest for one in (made, *others)}) == 4
    wrong = replace(made, k_feedback=(made.k_feedback[0], made.k_feedback[1][:, :8].copy()))
    with pytest.raises(ConfigError, match=CURE):
        KVStorage(spec("fp8_e4m3"), 4, scales=wrong)


def test_other_scales_and_weights_are_other_blocks() -> None:
    """F2, F10: each set of scales, and none, has keys of its own, in each dtype of weights."""
    settings = [KVSetting("fp8_e4m3"), KVSetting("fp8_e5m2")]
    settings += [KVSetting("fp8_e4m3", make_scales(seed=seed)) for seed in range(3)]
    settings += [KVSetting("fp8_e4m3", make_scales(scheme=scheme)) for scheme in ("head", "hadamard")]
    roots = {
        BlockKeyChain(model_digest=MODEL, kv_format=one.key_name(one.kv_format, weights), block_size=16).root("tenant")
        for one in settings
        for weights in WEIGHTS_DTYPES
    }
    assert len(roots) == len(settings) * len(WEIGHTS_DTYPES)
    again = KVSetting("fp8_e4m3", replace(make_scales(), octavo_version="9", file_name="elsewhere"))
    assert again.key_name("fp8_e4m3", "f32") == KVSetting("fp8_e4m3", make_scales()).key_name("fp8_e4m3", "f32")
