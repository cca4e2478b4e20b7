"""pallas_kernels.block_max and masked_topk: exact."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.block_max import block_max
from pallas_kernels.masked_topk import masked_topk

NEGATIVE_NAN = np.array(0xFFC00000, np.uint32).view(np.float32)[()]
X64 = pytest.mark.parametrize("x64", [False, True])


def tied_scores(rng, shape):
    """Few distinct values, both zeros, NaN and infinities."""
    return rng.choice(np.array([-np.inf, -1, -0.0, 0.0, 0.5, 2, np.nan, NEGATIVE_NAN], np.float32), shape)


@X64
@pytest.mark.parametrize("entries,block_size", [(1, 8), (13, 4), (16, 4), (45, 8), (7, 1), (5, 16)])
def test_block_max(entries, block_size, x64):
    rng = np.random.default_rng(entries)
    scores = np.where(rng.random((3, 5, entries)) < 0.5, tied_scores(rng, (3, 5, entries)), rng.standard_normal())
    scores = scores.astype(np.float32)
    visible = rng.integers(0, entries + 1, (3, 5)).astype(np.int32)
    with jax.enable_x64(x64):
        got = jax.jit(lambda s, v: block_max(s, v, block_size=block_size))(scores, visible)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, oracle.block_max(scores, visible, block_size))


def test_block_max_of_ragged_rows():
    scores = np.random.default_rng(0).standard_normal((3, 1, 13)).astype(np.float32)
    best = block_max(jnp.asarray(scores), jnp.array([[13], [5], [1]], jnp.int32), block_size=4)
    assert best.shape == (3, 1, 4)
    assert best[0, 0, 3] == scores[0, 0, 12]
    np.testing.assert_array_equal(best[1, 0, 2:], [-np.inf] * 2)
    np.testing.assert_array_equal(best[2, 0], [scores[2, 0, 0], *[-np.inf] * 3])


@X64
@pytest.mark.parametrize("k", [1, 8, 24, 100, 512, 1000, 1024])
def test_topk_at_every_width(k, x64):
    rng = np.random.default_rng(k)
    scores = np.stack([rng.standard_normal(1030), tied_scores(rng, 1030), rng.integers(0, 9, 1030)])
    scores = scores.astype(np.float32)
    with jax.enable_x64(x64):
        got = jax.jit(lambda s: masked_topk(s, k=k))(scores)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [oracle.top_k(row, k) for row in scores])


@pytest.mark.parametrize("entries", [1, 2, 7, 40])
def test_topk_of_short_and_empty_rows(entries):
    scores = tied_scores(np.random.default_rng(entries), (20, entries))
    scores[0] = -np.inf
    scores[1] = np.nan
    got = masked_topk(jnp.asarray(scores), k=9)
    np.testing.assert_array_equal(got, [oracle.top_k(row, 9) for row in scores])
    np.testing.assert_array_equal(got[:2], np.full((2, 9), -1))


def test_equal_scores_go_to_the_lower_position():
    scores = jnp.full((64,), 0.25)
    run = lambda s: masked_topk(s, k=8)  # noqa: E731
    for fn in (run, jax.jit(run)):
        np.testing.assert_array_equal(fn(scores), np.arange(8))
    many = jax.jit(jax.vmap(run))(jnp.tile(scores, (5, 1)))
    np.testing.assert_array_equal(many, np.tile(np.arange(8), (5, 1)))


def test_positions_ascend_however_the_scores_stand():
    for scores in (np.arange(40), np.arange(40)[::-1], np.random.default_rng(0).permutation(40)):
        got = np.asarray(masked_topk(jnp.asarray(scores, jnp.float32), k=11))
        assert (np.diff(got) > 0).all()
        assert set(got) == set(np.argsort(-scores)[:11])


def test_negative_nan_is_never_chosen():
    scores = np.random.default_rng(0).standard_normal(1024).astype(np.float32)
    scores[::64] = NEGATIVE_NAN
    np.testing.assert_array_equal(masked_topk(jnp.asarray(scores), k=8), oracle.top_k(scores, 8))


def test_zeros_of_both_signs_tie():
    np.testing.assert_array_equal(masked_topk(jnp.array([-1, -0.0, 0.0, -0.0, 0.0]), k=3), [1, 2, 3])
    np.testing.assert_array_equal(masked_topk(jnp.array([-0.0] * 3 + [0.0] * 3), k=2), [0, 1])


def test_infinity_is_chosen_first():
    np.testing.assert_array_equal(masked_topk(jnp.array([1.0, np.inf, -np.inf, 2.0, np.inf]), k=3), [1, 3, 4])


def test_positions_beyond_two_to_the_24():
    # Carried as float32 they would become even.
    entries = 2**24 + 6
    scores = jnp.zeros((entries,)).at[jnp.array([2**24 + 1, 2**24 + 3, 5])].set(1)
    np.testing.assert_array_equal(jax.jit(lambda s: masked_topk(s, k=3))(scores), [5, 2**24 + 1, 2**24 + 3])
