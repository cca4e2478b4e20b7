"""Gradients of gathered rows against loops in float64, summed in each of the two ways."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import blocks, scatter

ROUNDED = 2.0**-21  # relative to the largest sum: sums of a few hundred float32 terms


def arrays(seed, B=2, T=7, N=3, K=5, S=11, H=4):
    rng = np.random.default_rng(seed)
    index = rng.integers(-1, S, (B, T, K)).astype(np.int32)
    index[0, 0, :2] = 4  # a row named twice
    weight, vector = (rng.standard_normal(s).astype(np.float32) for s in ((B, T, N, K), (B, T, N, H)))
    return weight, vector, index


@pytest.mark.parametrize("way", ["products", "additions", "products in blocks"])
def test_sums_of_products(way, monkeypatch):
    weight, vector, index = arrays(0)
    monkeypatch.setattr(scatter, "dense", lambda *sizes: way != "additions")
    if way == "products in blocks":
        monkeypatch.setattr(blocks, "BLOCK_BYTES", 2 * 3 * 11 * 4 * 3)  # three queries at once
    want = np.zeros((2, 11, 4))
    for b, t, k in np.ndindex(index.shape):
        if index[b, t, k] >= 0:
            want[b, index[b, t, k]] += weight[b, t, :, k].astype(np.float64) @ vector[b, t].astype(np.float64)
    got = jax.jit(lambda *a: scatter.add_products(*a, 11))(weight, vector, index)
    np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDED * np.abs(want).max())


def test_which_way_follows_the_work():
    assert scatter.dense(8, 64, 64, 8192)
    assert not scatter.dense(8, 64, 64, 8193)


def test_gathered_products_and_their_gradients():
    weight, query, index = arrays(1)
    rows = np.random.default_rng(2).standard_normal((2, 11, 4)).astype(np.float32)
    unnamed = np.setdiff1d(np.arange(11), index[1])
    rows[1, unnamed] = np.nan  # may hold anything

    def loss(query, rows):
        return (scatter.gathered_products(query, rows, index) * weight).sum()

    got = scatter.gathered_products(query, rows, index)
    d_query, d_rows = jax.jit(jax.grad(loss, argnums=(0, 1)))(query, rows)
    want, want_query, want_rows = np.zeros(weight.shape), np.zeros(query.shape), np.zeros(rows.shape)
    for b, t, i, k in np.ndindex(weight.shape):
        if (row := index[b, t, k]) >= 0:
            want[b, t, i, k] = query[b, t, i].astype(np.float64) @ rows[b, row].astype(np.float64)
            want_query[b, t, i] += weight[b, t, i, k] * rows[b, row].astype(np.float64)
            want_rows[b, row] += weight[b, t, i, k] * query[b, t, i].astype(np.float64)
    for one, other in ((got, want), (d_query, want_query), (d_rows, want_rows)):
        np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDED * np.abs(other).max())


def test_rows_gather_many_small_gradients_in_bfloat16():
    """Thousands of equal parts: added up in bfloat16 they would stop at 256 of them."""
    T = 4096
    query = jnp.ones((1, T, 1, 1), jnp.bfloat16)
    index = jnp.zeros((1, T, 1), jnp.int32)
    for rows in (1, 4096):  # one of each way
        assert scatter.dense(1, 1, 1, rows) == (rows == 1)
        row = jnp.ones((1, rows, 1), jnp.bfloat16)
        gradient = jax.grad(lambda row: scatter.gathered_products(query, row, index).sum())(row)
        assert gradient[0, 0, 0] == T


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_integer_sums_are_the_float64_ones(size):
    rng = np.random.default_rng(0)
    rows = (size * rng.standard_normal((2, 40, 30, 8))).astype(np.float32)
    index = rng.integers(0, 5, (2, 40, 30))

    def add(rows):
        return jnp.zeros((2, 5, 8), rows.dtype).at[jnp.arange(2)[:, None, None], index].add(rows)

    want = np.zeros((2, 5, 8))
    for b, t, k in np.ndindex(index.shape):
        want[b, index[b, t, k]] += rows[b, t, k]
    got = jax.jit(lambda rows: scatter.add_in_any_order(add, rows))(rows)
    np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-23 * np.abs(want).max())  # rounded to float32
    assert np.isnan(scatter.add_in_any_order(add, np.where(index[..., None] == 2, np.inf, rows))).all()
    np.testing.assert_array_equal(scatter.add_in_any_order(add, 0 * rows), 0)
