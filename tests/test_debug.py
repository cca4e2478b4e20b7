"""pallas_kernels.debug: scores of NaN are counted exactly, and only when asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations
from operations import operations

from pallas_kernels import debug
from pallas_kernels.block_max import block_max
from pallas_kernels.index_scores import index_scores
from pallas_kernels.index_scores import reference as score_reference
from pallas_kernels.masked_topk import masked_topk
from pallas_kernels.pool_scores import pool_scores

FORMAT = "fp4_e8m0_32"
NAN_SCALE = 255
OPERATIONS = operations()
SCORING = ["block_max", "masked_topk", "index_scores", "pool_scores"]


def nan_keys(seed, B, T, S):
    """Index queries and keys, some of whose groups have a scale of NaN; and which keys have one."""
    rng = np.random.default_rng(seed)
    query = rng.choice([-1.0, 0.5, 2.0], (B, T, 2, 64)).astype(np.float32)
    weight = rng.standard_normal((B, T, 2)).astype(np.float32)
    codes = rng.integers(0, 256, (B, S, 32)).astype(np.uint8)
    scales = rng.choice([126, 127, NAN_SCALE], (B, S, 2), p=[0.5, 0.45, 0.05]).astype(np.uint8)
    visible = rng.integers(-1, S + 3, (B, T)).astype(np.int32)
    return (query, weight, codes, scales), visible, (scales == NAN_SCALE).any(-1)


def visible_nans(nan_BS, visible_BT):
    return sum(int(nan_BS[b, : max(visible_BT[b, t], 0)].sum()) for b, t in np.ndindex(visible_BT.shape))


@pytest.mark.parametrize("T,block_size", [(1, 1), (3, 8), (70, 4)])
@pytest.mark.parametrize("tile", [16, 64, 8192])
def test_index_scores(T, block_size, tile, monkeypatch):
    monkeypatch.setattr(score_reference, "KEY_TILE", tile)  # the last tile overlaps the one before
    arrays, visible, nan = nan_keys(T, 2, T, 77)
    with debug.count_nans() as counts:
        got = jax.jit(lambda *a: index_scores(*a, format=FORMAT, block_size=block_size))(*arrays, visible)
    want = visible_nans(nan, visible)
    assert counts == {"index_scores": want}
    assert want > 0
    np.testing.assert_array_equal(got, index_scores(*arrays, visible, format=FORMAT, block_size=block_size))
    assert not np.isnan(got).any()


@pytest.mark.parametrize("T", [1, 40])
def test_pool_scores(T):
    arrays, visible, nan = nan_keys(T, 2, T, 45)
    block = np.random.default_rng(T).integers(-1, 6, (2, T, 5)).astype(np.int32)  # some twice; the last one is short
    with debug.count_nans() as counts:
        pool_scores(*arrays, block, visible, format=FORMAT, block_size=8)
    want = 0
    for b, t in np.ndindex(visible.shape):
        for m in block[b, t]:
            want += 0 if m < 0 else int(nan[b, m * 8 : max(min(m * 8 + 8, visible[b, t]), m * 8)].sum())
    assert counts == {"pool_scores": want}
    assert want > 0


def test_scores_that_are_handed_over():
    rng = np.random.default_rng(0)
    scores = np.where(rng.random((3, 2, 50)) < 0.2, np.nan, rng.standard_normal((3, 2, 50))).astype(np.float32)
    visible = rng.integers(0, 51, (3, 2)).astype(np.int32)
    want = sum(int(np.isnan(scores[i][: visible[i]]).sum()) for i in np.ndindex(visible.shape))
    with debug.count_nans() as counts:
        block_max(scores, visible, block_size=8)
        masked_topk(scores, visible, k=4)
    assert counts == {"block_max": want, "masked_topk": want}
    with debug.count_nans() as counts:
        masked_topk(scores, k=4)
        masked_topk(jnp.ones((2, 3)), k=1)
    assert counts == {"masked_topk": np.isnan(scores).sum()}
    with debug.count_nans() as counts:
        block_max(jnp.ones((1, 1, 8)), jnp.full((1, 1), 8, jnp.int32), block_size=8)
    assert dict(counts) == {"block_max": 0}  # it ran, and met none


@pytest.mark.parametrize("name", SCORING)
def test_nothing_is_traced_outside(name):
    op = OPERATIONS[name]
    run = jax.jit(op.door)

    def callbacks():
        return sum("callback" in e.primitive.name for e in equations(run, *op.arrays))

    assert callbacks() == 0
    with debug.count_nans():
        assert callbacks() == 1
    assert callbacks() == 0


def test_what_was_jitted_outside_counts_inside_and_contexts_nest():
    scores = jnp.array([[np.nan, 1, np.nan]], jnp.float32)
    run = jax.jit(lambda s: masked_topk(s, k=1))
    run(scores)
    with debug.count_nans() as outer:
        run(scores)
        with debug.count_nans() as inner:
            run(scores)
        with debug.count_nans() as second:
            run(scores)
            run(scores)
    run(scores)
    assert (outer, inner, second) == ({"masked_topk": 8}, {"masked_topk": 2}, {"masked_topk": 4})


def test_counts_under_vmap_scan_gradient_and_x64():
    scores = np.full((4, 2, 6), np.nan, np.float32)
    scores[:, :, :3] = 1
    run = lambda s: masked_topk(s, k=2)  # noqa: E731
    for fn in (jax.vmap(run), lambda s: lax.scan(lambda c, x: (c, run(x)), 0, s)[1], jax.checkpoint(run)):
        with debug.count_nans() as counts:
            jax.jit(fn)(scores)
        assert counts == {"masked_topk": 24}
    visible = jnp.full((4, 2), 5, jnp.int32)
    with debug.count_nans() as counts, jax.enable_x64(True):
        jax.grad(lambda s: block_max(s, visible, block_size=6).sum())(jnp.asarray(scores))
    assert counts == {"block_max": 16}


@pytest.mark.parametrize("name", SCORING)
def test_results_still_come_from_the_kernel(name):
    op = OPERATIONS[name]
    with debug.count_nans():
        found = {equation.primitive.name for equation in equations(op.door, *op.arrays, platform="tpu")}
    assert {"debug_callback", "pallas_call"} <= found


def test_an_error_inside_closes_the_count():
    scores = jnp.full((1, 3), jnp.nan)
    with pytest.raises(ValueError, match="stop"), debug.count_nans() as counts:
        masked_topk(scores, k=1)
        raise ValueError("stop")
    masked_topk(scores, k=1)
    assert counts == {"masked_topk": 3}
