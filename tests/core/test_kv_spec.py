"""The memory account: published figures, and a budget that is kept to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.kv_spec import KVGroupSpec, KVSpec
from octavo.errors import ConfigError, MemoryBudgetError


def spec(layers: int, kv_heads: int, head_dim: int, kv_format: str = "bf16", block_size: int = 16) -> KVSpec:
    return KVSpec((KVGroupSpec("full", tuple(range(layers)), kv_heads, head_dim, kv_format),), block_size)


@pytest.mark.parametrize(
    ("model", "layers", "kv_heads", "head_dim", "bytes_per_token"),
    [
        ("Llama-2-7B", 32, 32, 128, 512 * 1024),
        ("OPT-13B", 40, 40, 128, 800 * 1024),
        ("Llama-2-70B", 80, 8, 128, 320 * 1024),
        ("SmolLM2-135M", 30, 3, 64, 23_040),
    ],
)
def test_bytes_per_token_of_real_models(
    model: str, layers: int, kv_heads: int, head_dim: int, bytes_per_token: int
) -> None:
    assert spec(layers, kv_heads, head_dim).bytes_per_token == bytes_per_token


def test_seed_figures() -> None:
    assert 4096 * spec(32, 32, 128).bytes_per_token == 2 * 2**30  # Llama-2-7B at 4,096: 2 GiB
    assert 131_072 * spec(80, 8, 128).bytes_per_token == 40 * 2**30  # Llama-3-70B at 128K: 40 GiB
    assert 4096 * spec(80, 8, 128).bytes_per_token == 1.25 * 2**30  # Llama-2-70B at 4,096: 1.25 GiB


@given(
    budget=st.integers(1, 10**12),
    layers=st.integers(1, 100),
    heads=st.integers(1, 64),
    block=st.sampled_from([16, 32, 256]),
)
def test_blocks_fill_the_budget_and_never_pass_it(budget: int, layers: int, heads: int, block: int) -> None:
    this = spec(layers, heads, 64, "f32", block)
    if budget < this.bytes_per_block:
        with pytest.raises(MemoryBudgetError, match="--kv-cache-memory"):
            this.num_blocks(budget)
        return
    count = this.num_blocks(budget)
    assert this.pool_bytes(count) <= budget < this.pool_bytes(count + 1)


def test_blocks_for_tokens_rounds_up() -> None:
    this = spec(2, 1, 16)
    assert [this.blocks_for_tokens(n) for n in (0, 1, 16, 17, 32)] == [0, 1, 1, 2, 2]


def test_a_latent_counts_once_and_other_odd_groups_are_refused() -> None:
    latent = KVGroupSpec("latent", (0, 1, 2), 1, 512 + 64, "bf16", kind="latent")
    assert (latent.layer_bytes_per_token, latent.bytes_per_token) == (576 * 2, 3 * 576 * 2)
    assert KVGroupSpec("window", (0,), 2, 64, "f32", window=512).bytes_per_token == 2 * 2 * 64 * 4
    with pytest.raises(ConfigError, match="window of w is 0 tokens"):
        KVGroupSpec("w", (0,), 1, 64, "f32", window=0)
    with pytest.raises(ConfigError, match="kind is 'pairs'"):
        KVGroupSpec("w", (0,), 1, 64, "f32", kind="pairs")
    with pytest.raises(ConfigError, match="2 latents"):
        KVGroupSpec("w", (0,), 2, 64, "f32", kind="latent")


def test_groups_must_have_blocks_of_equal_bytes() -> None:
    with pytest.raises(ConfigError, match="same number of bytes"):
        KVSpec((KVGroupSpec("a", (0,), 1, 64, "bf16"), KVGroupSpec("b", (1, 2), 1, 64, "bf16")), 16)
    with pytest.raises(ConfigError, match="at least one group"):
        KVSpec((), 16)
