"""pallas_kernels.index_scores and pool_scores: their backends against float64, masks and zeros exactly."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_max import block_max
from pallas_kernels.index_scores import index_scores
from pallas_kernels.pool_scores import pool_scores

KERNEL = "mosaic_gpu" if jax.default_backend() == "gpu" else "mosaic_tpu"
BACKENDS = pytest.mark.parametrize("backend", ["reference", KERNEL])
# XLA sums in an order of its own for each shape on a GPU.
SAME_ORDER = pytest.mark.parametrize("backend", ["reference", KERNEL] if KERNEL == "mosaic_tpu" else [KERNEL])
HEADS, J, FORMAT = 32, 128, "fp4_e8m0_32"
ROUNDINGS = (J + HEADS) * 2.0**-24  # float32 sums of 128 exact products and 32 heads, of the sum of all sizes
SHARED = {"B": 2, "T": 2, "S": 600}  # the shape of most tests, with pools of
BLOCKS = 20


def blocks_of(seed, B, T, C, count):
    """Block ids in any order, some twice, some -1."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random((B, T, C)) < 0.2, -1, rng.integers(0, count, (B, T, C))).astype(np.int32)


class Case:
    """Random inputs of one call and their scores in float64, -inf where invisible; `bound` is the rounding allowed."""

    def __init__(self, seed, B, T, S, visible=None):
        rng = np.random.default_rng(seed)
        query = rng.choice(oracle.E2M1, (B, T, HEADS, J)) * 2.0 ** rng.integers(-3, 2, (B, T, HEADS, 1))
        self.query = jnp.asarray(query, jnp.bfloat16)
        self.weight = rng.standard_normal((B, T, HEADS)).astype(np.float32)
        codes = rng.integers(0, 16, (B, S, J)).astype(np.uint8)
        self.codes = oracle.pack(codes) if codes.size < 2**18 else codes[..., ::2] + 16 * codes[..., 1::2]
        self.scales = rng.integers(122, 131, (B, S, J // 32)).astype(np.uint8)
        if visible is None:
            borders = [S, 0, 1, 7, 8, 9, 255, 256, 257, 511, 512, 513, 1023, 1025, 2047, 2049, S - 1]
            visible = np.resize(np.clip(borders, 0, S), (B, T))
        self.visible = np.asarray(visible, np.int32)
        self.expect(query, oracle.E2M1[codes] * np.repeat(oracle.E8M0[self.scales], 32, -1).astype(np.float64))

    def expect(self, query, keys):
        B, T, S = *query.shape[:2], keys.shape[1]
        self.scores, self.bound = np.full((B, T, S), -np.inf), np.zeros((B, T, S))
        for b, t in np.ndindex(B, T):
            n = max(self.visible[b, t], 0)
            dots = np.maximum(query[b, t] @ keys[b, :n].T, 0)
            sizes = np.abs(query[b, t]) @ np.abs(keys[b, :n]).T
            self.scores[b, t, :n] = self.weight[b, t].astype(np.float64) @ dots
            self.bound[b, t, :n] = np.abs(self.weight[b, t].astype(np.float64)) @ sizes * ROUNDINGS

    def pooled(self, scores, block, block_size):
        """What `scores` of every entry hold at the entries of each query's blocks; -inf where there is none."""
        B, T, S = scores.shape
        entry = (np.maximum(block, 0)[..., None] * block_size + np.arange(block_size)).reshape(B, T, -1)
        there = np.repeat(block >= 0, block_size, -1) & (entry < S)
        return np.where(there, np.take_along_axis(scores, np.minimum(entry, S - 1), -1), -np.inf)

    @property
    def arrays(self):
        return self.query, self.weight, self.codes, self.scales

    def index(self, backend, block_size=1, x64=False):
        static = {"format": FORMAT, "block_size": block_size, "implementation": backend}
        return run(index_scores, x64, *self.arrays, self.visible, **static)

    def pool(self, backend, block, block_size, x64=False):
        static = {"format": FORMAT, "block_size": block_size, "implementation": backend}
        return run(pool_scores, x64, *self.arrays, np.asarray(block, np.int32), self.visible, **static)


def run(operation, x64, *arrays, **static):
    """The result; tests that share shapes share the interpreted kernel, which takes seconds to compile."""
    interpreted = pltpu.force_tpu_interpret_mode() if KERNEL == "mosaic_tpu" else contextlib.nullcontext()
    with jax.enable_x64(x64), interpreted:
        got = np.asarray(operation(*map(jnp.asarray, arrays), **static))
    assert got.dtype == np.float32
    return got


def assert_close(got, want, bound):
    """Equal masks; where there are scores, within `bound`."""
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    there = ~np.isneginf(want)
    assert (np.abs(got[there] - want[there]) <= bound[there]).all()


def assert_maxima_close(got, case, block_size):
    """A maximum moves by no more than the worst of its block."""
    pad = [(0, 0), (0, 0), (0, -case.scores.shape[2] % block_size)]
    worst = np.pad(case.bound, pad).reshape(*got.shape, block_size).max(-1)
    best = np.pad(case.scores, pad, constant_values=-np.inf).reshape(*got.shape, block_size).max(-1)
    assert_close(got, best, worst)


# ---- every key


@BACKENDS
@pytest.mark.parametrize(
    "B,T,S,block_size,x64",
    [(2, 1, 1, 1, False), (2, 3, 7, 8, True), (1, 33, 1031, 8, True), (3, 1, 4001, 4, False), (3, 1, 8321, 8, False)],
)
def test_scores_are_the_definition(backend, B, T, S, block_size, x64):
    case = Case(S, B, T, S)
    got = case.index(backend, block_size, x64)
    assert got.shape == (B, T, -(-S // block_size))
    assert_maxima_close(got, case, block_size)


def test_query_tiles_see_keys_of_their_own():
    case = Case(0, 1, 140, 600, visible=np.sort(np.random.default_rng(0).integers(0, 601, (1, 140))))
    assert_close(case.index("mosaic_tpu"), case.scores, case.bound)


@SAME_ORDER
@pytest.mark.parametrize("B,T,block_size", [(2, 2, 8), (1, 10, 4 if KERNEL == "mosaic_gpu" else 16)])
def test_block_maxima_are_those_of_the_scores_to_the_bit(backend, B, T, block_size):
    case = Case(T, B, T, 600)
    best = block_max(jnp.asarray(case.index(backend)), case.visible, block_size=block_size, implementation="reference")
    np.testing.assert_array_equal(case.index(backend, block_size), best)


# ---- a pool of blocks


@BACKENDS
@pytest.mark.parametrize(
    "B,T,S,C,block_size,x64",
    [(2, 1, 7, 1, 8, False), (1, 3, 1025, 70, 8, True), (2, 2, 261, 9, 4, False), (1, 2, 256, 2, 128, False)],
)
def test_pool_scores_are_those_of_its_entries(backend, B, T, S, C, block_size, x64):
    case = Case(S, B, T, S, visible=np.resize([S, S - 1, S // 2], (B, T)))
    count = -(-S // block_size)
    block = blocks_of(S, B, T, C, count)
    block[..., -1] = count - 1  # short
    got = case.pool(backend, block, block_size, x64)
    assert got.shape == (B, T, C * block_size)
    assert_close(got, case.pooled(case.scores, block, block_size), case.pooled(case.bound, block, block_size))


@BACKENDS
def test_pool_scores_are_the_gathered_index_scores(backend):
    case, block = Case(6, **SHARED), blocks_of(6, 2, 2, BLOCKS, 75)
    gathered = case.pooled(case.index(backend), block, 8)
    assert_close(case.pool(backend, block, 8), gathered, 2 * case.pooled(case.bound, block, 8))


@BACKENDS
def test_an_empty_pool_and_a_query_that_sees_nothing(backend):
    case, block = Case(4, **SHARED, visible=[[600, 0], [9, 600]]), np.arange(4 * BLOCKS).reshape(2, 2, BLOCKS) % 75
    block[0, 0] = block[1, 1, :] = -1
    block[1, 1, -1] = 74
    got = case.pool(backend, block, 8)
    np.testing.assert_array_equal(got[0], np.full((2, BLOCKS * 8), -np.inf))
    assert_close(got, case.pooled(case.scores, block, 8), case.pooled(case.bound, block, 8))


# ---- exact things, of both


@BACKENDS
def test_negative_dots_score_exactly_zero(backend):
    case, block = Case(0, **SHARED), blocks_of(0, 2, 2, BLOCKS, 75)
    case.query, case.codes = jnp.abs(case.query), case.codes | np.uint8(0x88)
    expected = np.where(np.arange(600) < case.visible[..., None], 0, -np.inf)
    np.testing.assert_array_equal(case.index(backend), expected)
    np.testing.assert_array_equal(case.pool(backend, block, 8), case.pooled(expected, block, 8))


@BACKENDS
def test_a_key_of_zeros_scores_exactly_zero(backend):
    case, block = Case(0, **SHARED), blocks_of(0, 2, 2, BLOCKS, 75)
    case.codes[:], case.scales[:] = 0, 1  # what zeros quantise to
    expected = np.where(np.arange(600) < case.visible[..., None], 0, -np.inf)
    np.testing.assert_array_equal(case.index(backend), expected)
    np.testing.assert_array_equal(case.pool(backend, block, 8), case.pooled(expected, block, 8))


@BACKENDS
def test_every_code_scale_and_channel_decodes_exactly(backend):
    # Head i reads channel 32 (i % 4) + n + i // 4 alone, head by head through the weights.
    case = Case(0, **SHARED, visible=np.full((2, 2), 600))
    codes = (np.arange(600)[:, None] + np.arange(J)) % 16
    case.codes = np.stack([oracle.pack(codes.astype(np.uint8))] * 2)
    # From 2 on: half of 2^-126 is subnormal, which CPUs and TPUs read as 0 (formats.decode_e8m0).
    case.scales = (2 + (np.arange(2 * 600 * 4).reshape(2, 600, 4) * 7) % 249).astype(np.uint8)
    keys = oracle.E2M1[codes] * np.repeat(oracle.E8M0[case.scales], 32, -1)
    for n in range(0, 32, 8):
        channel = 32 * (np.arange(HEADS) % 4) + n + np.arange(HEADS) // 4
        case.query = jnp.asarray(np.broadcast_to(np.eye(J)[channel], (2, 2, HEADS, J)), jnp.bfloat16)
        for head in range(n % 5, HEADS, 3):
            case.weight = np.broadcast_to(np.eye(HEADS, dtype=np.float32)[head], (2, 2, HEADS))
            expected = np.maximum(keys[:, None, :, channel[head]], 0).repeat(2, 1)
            np.testing.assert_array_equal(case.index(backend), expected)


@BACKENDS
def test_nan_keys_weights_and_queries_are_never_chosen(backend):
    case, block = Case(1, **SHARED, visible=[[600, 590], [500, 590]]), blocks_of(1, 2, 2, BLOCKS, 75)
    case.scales[:, 13, 2] = case.scales[0, 590:, 1] = 255
    case.weight[1, 0, 7] = np.nan
    case.query = case.query.at[0, 1, 3, 5].set(jnp.nan)
    case.scores[:, :, 13] = case.scores[0, 0, 590:] = case.scores[1, 0] = case.scores[0, 1] = -np.inf
    block[..., 0] = 1
    assert_close(case.index(backend), case.scores, case.bound)
    assert_close(case.pool(backend, block, 8), case.pooled(case.scores, block, 8), case.pooled(case.bound, block, 8))


@BACKENDS
def test_what_is_invisible_cannot_matter(backend):
    case, block = Case(2, **SHARED, visible=[[513, 100], [5, 0]]), blocks_of(2, 2, 2, BLOCKS, 75)
    before = case.index(backend, 8), case.pool(backend, block, 8)
    for b, stop in enumerate(case.visible.max(1)):
        case.scales[b, stop:], case.codes[b, stop:] = 255, 0x77
    for got, expected in zip((case.index(backend, 8), case.pool(backend, block, 8)), before, strict=True):
        np.testing.assert_array_equal(got, expected)


@SAME_ORDER
def test_capacity_changes_nothing(backend):
    case, block = Case(3, **SHARED, visible=[[600, 550], [599, 0]]), blocks_of(3, 2, 2, BLOCKS, 75)
    before = case.index(backend, 8), case.pool(backend, block, 8)
    for name in ("codes", "scales"):
        plane = getattr(case, name)
        setattr(case, name, np.concatenate([plane, np.full((2, 1500, plane.shape[2]), 255, np.uint8)], axis=1))
    got = case.index(backend, 8)
    np.testing.assert_array_equal(got[..., :75], before[0])
    np.testing.assert_array_equal(got[..., 75:], -np.inf)
    np.testing.assert_array_equal(case.pool(backend, block, 8), before[1])


# ---- where they run


def test_kernels_run_inside_scan_and_vmap():
    case, block = Case(5, **SHARED), blocks_of(5, 2, 2, BLOCKS, 75)
    static = {"format": FORMAT, "block_size": 8, "implementation": "mosaic_tpu"}

    @sequential_vmap  # as the dispatcher maps them
    def both(query, weight, codes, scales, block, visible):
        scores = index_scores(query, weight, codes, scales, visible, **static)
        return scores, pool_scores(query, weight, codes, scales, block, visible, **static)

    added = [jnp.asarray(a)[:, None, None] for a in (*case.arrays, block, case.visible)]
    with pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda xs: lax.scan(lambda carry, x: (carry, jax.vmap(both)(*x)), 0, xs)[1])(added)
    np.testing.assert_array_equal(got[0][:, 0, 0], case.index("mosaic_tpu", 8))
    np.testing.assert_array_equal(got[1][:, 0, 0], case.pool("mosaic_tpu", block, 8))


def test_the_dispatcher_maps_them():
    case, block = Case(5, **SHARED), blocks_of(5, 2, 2, BLOCKS, 75)
    arrays = [jnp.asarray(a) for a in (*case.arrays, block, case.visible)]

    def pool(*a):
        return pool_scores(*a, format=FORMAT, block_size=8)

    def index(query, weight, codes, scales, block, visible):
        return index_scores(query, weight, codes, scales, visible, format=FORMAT, block_size=8)

    for fn in (index, pool):
        mapped = jax.jit(jax.vmap(fn))(*(a[:, None] for a in arrays))
        np.testing.assert_allclose(mapped[:, 0], fn(*arrays), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(
    "change,block_size",
    [
        ({"format": None}, 8),
        ({"format": "fp8_e8m0_32"}, 8),
        ({"heads": 4}, 8),
        ({"channels": 32}, 8),
        ({}, 3),
        ({}, 256),
    ],
)
def test_the_kernels_refuse_what_they_cannot_serve(change, block_size):
    heads, channels = change.get("heads", HEADS), change.get("channels", J)
    arrays = (
        jnp.ones((1, 1, heads, channels), jnp.bfloat16),
        jnp.ones((1, 1, heads)),
        jnp.zeros((1, 9, channels // 2), jnp.uint8),
        jnp.zeros((1, 9, channels // 32), jnp.uint8),
    )
    visible = jnp.full((1, 1), 9, jnp.int32)
    static = {"format": change.get("format", FORMAT), "block_size": block_size, "implementation": "mosaic_tpu"}
    with pytest.raises(NotImplementedError, match=r"not \d|not None|not fp8"):
        jax.eval_shape(lambda: index_scores(*arrays, visible, **static))
    with pytest.raises(NotImplementedError, match=r"not \d|not None|not fp8"):
        jax.eval_shape(lambda: pool_scores(*arrays, visible[..., None], visible, **static))


@pytest.mark.parametrize("B,T,S,C", [(1, 0, 9, 2), (0, 1, 9, 2), (1, 1, 0, 2), (1, 1, 9, 0)])
def test_empty_inputs_give_empty_or_absent_scores(B, T, S, C):
    case = Case(0, B, T, S, visible=np.zeros((B, T)))
    if C:
        np.testing.assert_array_equal(case.index("mosaic_tpu", 8), np.full((B, T, -(-S // 8)), -np.inf))
    got = case.pool("mosaic_tpu", np.zeros((B, T, C)), 8)
    np.testing.assert_array_equal(got, np.full((B, T, C * 8), -np.inf))
