"""pallas_kernels.block_max and masked_topk: exact, on every backend that a CPU can run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.block_max import block_max
from pallas_kernels.masked_topk import masked_topk, mosaic_tpu
from pallas_kernels.masked_topk.sharded import masked_topk_in_shard, masked_topk_over

NEGATIVE_NAN = np.array(0xFFC00000, np.uint32).view(np.float32)[()]
BACKEND = pytest.mark.parametrize("backend", ["reference", "mosaic_tpu"])


@pytest.fixture
def kernels(backend):
    """Interprets TPU kernels for as long as a test that names them runs."""
    with pltpu.force_tpu_interpret_mode() if backend == "mosaic_tpu" else contextlib.nullcontext():
        yield backend


def tied_scores(rng, shape):
    """Few distinct values, both zeros, NaN of both signs and infinities."""
    return rng.choice(np.array([-np.inf, -1, -0.0, 0.0, 0.5, 2, np.nan, NEGATIVE_NAN, np.inf], np.float32), shape)


def every_kind(rng, entries):
    """Rows [9, entries], one of each kind that went wrong somewhere."""
    rows = [
        rng.standard_normal(entries),
        tied_scores(rng, entries),
        np.full(entries, 0.25),
        rng.choice(np.array([0.0, -0.0]), entries),
        np.where(rng.random(entries) < 0.01, rng.standard_normal(entries), 0.0),  # zeros, a few above and below
        np.full(entries, -np.inf),
        rng.choice(np.array([np.nan, NEGATIVE_NAN]), entries),
        rng.choice(np.array([np.inf, 1.0]), entries),
        -np.arange(entries),
    ]
    return np.stack(rows).astype(np.float32)


# ---- block_max


@BACKEND
@pytest.mark.parametrize(
    "shape,block_size,x64",
    [
        ((3, 5, 1), 8, False),
        ((3, 3, 7), 1, False),
        ((2, 5, 4001), 4, True),
        ((2, 1, 8321), 8, False),
        ((2, 1, 2048), 8, True),  # a lone query, whole registers
        ((1, 1, 4096), 32, False),
    ],
)
def test_block_max_equals_the_definition(kernels, shape, block_size, x64):
    rng = np.random.default_rng(shape[-1])
    scores = np.where(rng.random(shape) < 0.5, tied_scores(rng, shape), rng.standard_normal(shape))
    scores = scores.astype(np.float32)
    visible = rng.integers(0, shape[-1] + 1, shape[:2]).astype(np.int32)
    visible[0, 0] = shape[-1]
    with jax.enable_x64(x64):
        got = block_max(jnp.asarray(scores), jnp.asarray(visible), block_size=block_size, implementation=kernels)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, oracle.block_max(scores, visible, block_size))


@BACKEND
def test_block_max_sees_exactly_the_visible_entries_around_tile_borders(kernels):
    visible = np.array([[0, 1, 8, 9, 16383, 16384, 16385, 20000]], np.int32)
    scores = np.broadcast_to(np.arange(20000, dtype=np.float32), (1, visible.size, 20000))
    got = block_max(jnp.asarray(scores), jnp.asarray(visible), block_size=8, implementation=kernels)
    last = np.minimum(8 * np.arange(2500) + 7, visible[..., None] - 1)  # the entry that is greatest
    np.testing.assert_array_equal(got, np.where(8 * np.arange(2500) < visible[..., None], last, -np.inf))


@BACKEND
@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 16), (2, 0, 16)])
def test_block_max_of_nothing(kernels, shape):
    visible = jnp.zeros(shape[:2], jnp.int32)
    got = block_max(jnp.zeros(shape, jnp.float32), visible, block_size=8, implementation=kernels)
    assert got.shape == (*shape[:2], -(-shape[-1] // 8))


def test_block_max_of_ragged_rows():
    scores = np.random.default_rng(0).standard_normal((3, 1, 13)).astype(np.float32)
    best = block_max(jnp.asarray(scores), jnp.array([[13], [5], [1]], jnp.int32), block_size=4)
    assert best.shape == (3, 1, 4)
    assert best[0, 0, 3] == scores[0, 0, 12]
    np.testing.assert_array_equal(best[1, 0, 2:], [-np.inf] * 2)
    np.testing.assert_array_equal(best[2, 0], [scores[2, 0, 0], *[-np.inf] * 3])


def test_block_max_refuses_blocks_that_do_not_tile_the_lanes():
    with pytest.raises(NotImplementedError, match="block_size=6"):
        block_max(jnp.zeros((1, 1, 12)), jnp.ones((1, 1), jnp.int32), block_size=6, implementation="mosaic_tpu")


# ---- masked_topk


@BACKEND
@pytest.mark.parametrize(
    "entries,k,x64",
    [
        (1, 1, False),
        (7, 8, True),
        (1030, 1024, False),
        (4001, 100, True),
        (4001, 1000, False),
        (8321, 512, False),
        (8321, 2048, True),
    ],
)
def test_topk_equals_the_definition(kernels, entries, k, x64):
    rng = np.random.default_rng(k)
    scores = every_kind(rng, entries)
    length = rng.integers(0, entries + 1, 9).astype(np.int32)
    length[::2] = entries
    with jax.enable_x64(x64):
        got = masked_topk(jnp.asarray(scores), jnp.asarray(length), k=k, implementation=kernels)
    assert got.dtype == jnp.int32
    want = [oracle.top_k(row[:stop], k) for row, stop in zip(scores, length, strict=True)]
    np.testing.assert_array_equal(got, want)


@BACKEND
def test_topk_chooses_below_the_length_around_tile_borders(kernels):
    lengths = np.array([0, 1, 128, 129, 16383, 16384, 16385, 20000], np.int32)
    rising = np.broadcast_to(np.arange(20000, dtype=np.float32), (lengths.size, 20000))
    got = masked_topk(jnp.asarray(rising), jnp.asarray(lengths), k=130, implementation=kernels)
    for row, length in zip(np.asarray(got), lengths, strict=True):
        chosen = np.arange(max(0, length - 130), length)
        np.testing.assert_array_equal(row, [*chosen, *[-1] * (130 - chosen.size)])


@BACKEND
@pytest.mark.parametrize("kind", ["normal", "tied", "equal"])
def test_topk_of_a_lone_long_row(kernels, kind):
    rng = np.random.default_rng(0)
    scores = {"normal": rng.standard_normal(140000), "tied": tied_scores(rng, 140000), "equal": np.ones(140000)}[kind]
    scores = scores.astype(np.float32)
    for length in (140000, 131072):
        got = masked_topk(jnp.asarray(scores), jnp.int32(length), k=600, implementation=kernels)
        np.testing.assert_array_equal(got, oracle.top_k(scores[:length], 600))


def hand_checked(values, then=-np.inf):
    """One row of 64 scores that begins with `values`; one shape, so that it compiles once."""
    return jnp.asarray([*values, *[then] * (64 - len(values))], jnp.float32)


@BACKEND
@pytest.mark.parametrize(
    "scores,chosen",
    [
        (hand_checked([], then=0.25), [0, 1, 2, 3, 4, 5, 6, 7]),
        (hand_checked([-1, -0.0, 0.0, -0.0, 0.0], then=-2.0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (hand_checked([-1, -1, -0.0, 0.0], then=0.0), [2, 3, 4, 5, 6, 7, 8, 9]),
        (hand_checked([1, np.inf, -np.inf, 2, np.nan, np.inf]), [0, 1, 3, 5, -1, -1, -1, -1]),
        (hand_checked([NEGATIVE_NAN, 3, NEGATIVE_NAN, 4], then=-np.inf), [1, 3, -1, -1, -1, -1, -1, -1]),
        (hand_checked(np.arange(64)), list(range(56, 64))),
        (hand_checked(-np.arange(64)), list(range(8))),
        (hand_checked([]), [-1] * 8),
    ],
)
def test_topk_by_hand(kernels, scores, chosen):
    np.testing.assert_array_equal(masked_topk(scores, k=8, implementation=kernels), chosen)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", marks=pytest.mark.xfail(strict=True, reason="XLA on CPU takes subnormals for 0")),
        "mosaic_tpu",
    ],
)
def test_topk_orders_subnormals(kernels):
    scores = hand_checked([-1e-40, 0.0, 1e-40, 2e-40, -0.0, 3e-40, 1e-40, 1e-40, -2e-40, 4e-40], then=-2e-40)
    got = masked_topk(scores, k=8, implementation=kernels)
    np.testing.assert_array_equal(got, [1, 2, 3, 4, 5, 6, 7, 9])


@BACKEND
def test_topk_under_vmap_and_scan_repeats_to_the_bit(kernels):
    scores = jnp.asarray(every_kind(np.random.default_rng(0), 40))
    stacked = jnp.stack([scores, scores[::-1], scores])
    if kernels == "reference":
        run = lambda s: masked_topk(s, k=9)  # noqa: E731
    else:  # what the dispatcher wraps a kernel in, a scan; the interpreter cannot run inside its choice of a platform
        kernel = sequential_vmap(functools.partial(mosaic_tpu.masked_topk, k=9))
        run = lambda s: kernel(s, jnp.full((9,), 40, jnp.int32))  # noqa: E731
    got = jax.jit(jax.vmap(run))(stacked)
    np.testing.assert_array_equal(got, [[oracle.top_k(row, 9) for row in rows] for rows in np.asarray(stacked)])
    np.testing.assert_array_equal(got[0], got[2])


@BACKEND
def test_topk_of_nothing(kernels):
    got = masked_topk(jnp.zeros((3, 0), jnp.float32), k=5, implementation=kernels)
    np.testing.assert_array_equal(got, np.full((3, 5), -1))
    assert masked_topk(jnp.zeros((0, 4), jnp.float32), k=5, implementation=kernels).shape == (0, 5)


def test_positions_beyond_two_to_the_24():
    # Carried as float32 they would become even.
    entries = 2**24 + 6
    scores = jnp.zeros((entries,)).at[jnp.array([2**24 + 1, 2**24 + 3, 5])].set(1)
    np.testing.assert_array_equal(jax.jit(lambda s: masked_topk(s, k=3))(scores), [5, 2**24 + 1, 2**24 + 3])
    with pytest.raises(NotImplementedError, match="16777222 entries"):
        masked_topk(scores, k=3, implementation="mosaic_tpu")


def test_a_backend_of_no_name_is_refused():
    with pytest.raises(ValueError, match="no backend 'sorted'"):
        masked_topk(jnp.zeros((4,)), k=2, implementation="sorted")
    with pytest.raises(ValueError, match="no backend 'sorted'"):
        block_max(jnp.zeros((1, 1, 4)), jnp.ones((1, 1), jnp.int32), block_size=2, implementation="sorted")


# ---- rows split over devices


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [5, 24, 70])  # below a shard of 16 or 8, above it, above the row
def test_sharded_topk_equals_the_whole_on_every_device(devices, k):
    scores = every_kind(np.random.default_rng(1), 64)  # whole rows of ties, across every border of shards
    mesh = Mesh(np.array(jax.devices()[:devices]), ("entries",))
    run = jax.jit(functools.partial(masked_topk_over, mesh, "entries", k=k))
    for length in (np.full(9, 64, np.int32), np.arange(9, dtype=np.int32) * 8, np.full(9, 33, np.int32)):
        got = run(scores, length)
        np.testing.assert_array_equal(got, masked_topk(jnp.asarray(scores), jnp.asarray(length), k=k))
        want = [oracle.top_k(row[:stop], k) for row, stop in zip(scores, length, strict=True)]
        assert len(got.addressable_shards) == devices
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, want)


def test_sharded_topk_over_two_axes_and_beside_split_rows():
    scores = every_kind(np.random.default_rng(2), 48)[:8]
    length = np.array([48, 47, 24, 25, 23, 48, 0, 1], np.int32)
    want = [oracle.top_k(row[:stop], 7) for row, stop in zip(scores, length, strict=True)]
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
    for entries, rows in ((("a", "b"), None), ("b", "a"), ("a", "b")):
        choose = functools.partial(masked_topk_in_shard, k=7, axis_name=entries)
        run = dispatch.per_shard(choose, mesh, (P(rows, entries), P(rows)), P(rows))
        np.testing.assert_array_equal(jax.jit(run)(scores, length), want)


def test_sharded_topk_refuses_what_the_devices_do_not_divide():
    mesh = Mesh(np.array(jax.devices()[:4]), ("entries",))
    with pytest.raises(ValueError, match="30 entries over 4 devices of axis 'entries'"):
        masked_topk_over(mesh, "entries", jnp.zeros((1, 30)), jnp.ones((1,), jnp.int32), k=2)
