"""Rotary positions and the two tables."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import vectors

from v41jax import config, rope

YARN = (16.0, 32.0, 1.0, 65536)
COS_ATOL = 2e-7  # three float32 roundings of values up to 1: cosine, sine, reference
ROTATE_ATOL = 1e-6  # the same times channels of size 3, and one sum

TABLES = {"window": (10000.0, None, None), "compressed": (160000.0, config.RopeScaling(), YARN)}


@pytest.mark.parametrize("name", TABLES)
def test_frequencies_are_rounded_as_the_release_rounds(name):
    theta, scaling, yarn = TABLES[name]
    np.testing.assert_array_equal(rope.frequencies(theta, 64, scaling), oracle.frequencies(theta, 64, yarn))


@pytest.mark.parametrize("name", TABLES)
def test_cos_and_sin_equal_the_release_up_to_a_million_tokens(name):
    golden = vectors()
    table = rope.frequencies(*TABLES[name][:1], 64, TABLES[name][1])
    unit = jnp.tile(jnp.array([1.0, 0.0]), (10, 32))
    turned = jax.jit(lambda x, p: rope.rotate(x, p, table))(unit, golden["rope.positions"])
    np.testing.assert_allclose(turned[:, 0::2], golden[f"rope.{name}.cos"], rtol=0, atol=COS_ATOL)
    np.testing.assert_allclose(turned[:, 1::2], golden[f"rope.{name}.sin"], rtol=0, atol=COS_ATOL)


@pytest.mark.parametrize("x64", [False, True])
def test_rotate_equals_the_release_and_undoes(x64):
    golden, table = vectors(), rope.layer_frequencies(config.v41_flash, compressed=True)
    with jax.enable_x64(x64):
        x, position = jnp.asarray(golden["rope.x"]), jnp.asarray(golden["rope.positions"])[:, None]
        y = rope.rotate(x, position, table)
        assert y.dtype == jnp.float32
        np.testing.assert_allclose(y, golden["rope.y"], rtol=0, atol=ROTATE_ATOL)
        np.testing.assert_allclose(rope.unrotate(y, position, table), x, rtol=0, atol=ROTATE_ATOL)


def test_rotate_equals_the_oracle_and_leaves_the_rest():
    table = oracle.frequencies(100.0, 8)
    x = np.random.default_rng(0).standard_normal((6, 20)).astype(np.float32)
    position = np.array([0, 1, 5, 1000, 65536, 1048575], np.int32)
    y = np.asarray(rope.rotate(jnp.asarray(x), jnp.asarray(position), table))
    want = np.stack([oracle.rotate(row, p, table) for row, p in zip(x, position, strict=True)])
    np.testing.assert_allclose(y, want, rtol=0, atol=ROTATE_ATOL)
    np.testing.assert_array_equal(y[:, :12], x[:, :12])
    np.testing.assert_array_equal(y[0], x[0])  # position 0


def test_window_layers_have_their_own_theta_and_no_yarn():
    cfg = config.v41_flash
    window = rope.layer_frequencies(cfg, compressed=False)
    stretched = dataclasses.replace(cfg, rope_scaling=config.RopeScaling(factor=99.0))
    np.testing.assert_array_equal(window, rope.layer_frequencies(stretched, compressed=False))
    np.testing.assert_array_equal(window, oracle.frequencies(10000.0, 64))
    compressed = rope.layer_frequencies(cfg, compressed=True)
    np.testing.assert_array_equal(compressed, oracle.frequencies(160000.0, 64, YARN))
    unit = jnp.tile(jnp.array([1.0, 0.0]), 32)
    at = jnp.asarray(4096, jnp.int32)
    turned = [rope.rotate(unit, at, table) for table in (window, compressed)]
    for got, table in zip(turned, (window, compressed), strict=True):
        np.testing.assert_allclose(got, oracle.rotate(unit, 4096, table), rtol=0, atol=ROTATE_ATOL)
    assert np.abs(turned[0] - turned[1]).max() > 1


def test_without_rope_scaling_compressed_layers_keep_their_theta():
    cfg = dataclasses.replace(config.v41_flash, rope_scaling=None)
    np.testing.assert_array_equal(rope.layer_frequencies(cfg, compressed=True), oracle.frequencies(160000.0, 64))


def test_bfloat16_is_rotated_in_float32():
    table = oracle.frequencies(100.0, 8)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 16)), jnp.bfloat16)
    position = jnp.arange(4, dtype=jnp.int32) * 1001
    got = rope.rotate(x, position, table)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, rope.rotate(x.astype(jnp.float32), position, table).astype(jnp.bfloat16))
