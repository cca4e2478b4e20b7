"""The Hopper top-k: on a GPU the kernel itself, elsewhere the same code with its register operations in NumPy.

The emulation runs all lanes of a thread block in step, one statement after another. It checks the algorithm; what it
cannot check (PTX, barriers, registers) the GPU does: the same assertions run there with the kernel.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels import masked_topk as op
from pallas_kernels.masked_topk import mosaic_gpu

ON_GPU = jax.default_backend() == "gpu"
WIDTHS = (1, 7, 4001, 8321, 131072, 1048576) if ON_GPU else (1, 7, 4001)
WANTED = (1, 8, 100, 512, 1000, 1024, 2048) if ON_GPU else (1, 100, 1024)
BIG, LITTLE = (131072, 512) if ON_GPU else (4001, 100)


def oracle(scores_RS, length_R, k):
    """The definition, a row at a time: a stable sort by descending score."""
    chosen = np.full((len(scores_RS), k), -1, np.int32)
    for r, scores_S in enumerate(scores_RS):
        inside = np.arange(len(scores_S)) < length_R[r]
        clean = np.where(inside & ~np.isnan(scores_S), scores_S, -np.inf) + np.float32(0)
        best = np.argsort(-clean, kind="stable")[:k]
        best = np.sort(best[clean[best] > -np.inf])
        chosen[r, : len(best)] = best
    return chosen


class Ref:
    """A NumPy array that reads like a kernel's reference."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, index):
        return self.array[index]

    @property
    def at(self):
        return type("At", (), {"__getitem__": lambda _, index: Ref(self.array[index])})()


def emulated(monkeypatch):
    """Puts NumPy in place of the kernel's register operations: arrays are [lanes, registers], scalars [lanes, 1]."""
    state = {}

    def kernel(body, *, out_type, grid, num_threads, scratch_types, **_):
        def call(*arrays):
            out = np.full(out_type.shape, -7, np.int32)
            state["lanes"] = num_threads * lanes.WARPGROUP
            for row in range(grid[0]):
                monkeypatch.setattr(lax, "axis_index", lambda _, row=row: row)
                scratch = [Ref(np.full(s.shape, 12345, np.int32)) for s in scratch_types]
                body(*(Ref(np.asarray(a)) for a in arrays), Ref(out), *scratch)
            return jnp.asarray(out)

        return call

    def numbers():
        return np.arange(state["lanes"], dtype=np.int32)[:, None]

    def warps(values):
        return np.broadcast_to(values, (state["lanes"], np.shape(values)[-1])).reshape(-1, 32, np.shape(values)[-1])

    def slots(registers, run):
        register = np.arange(registers, dtype=np.int32)
        return register // run * 32 * run + numbers() % 32 * run + register % run

    def load(ref, index, mode):
        index, bits = np.asarray(index), ref.array.view(np.int32)
        if mode != "each":
            leader = np.repeat(index[:, ::4], 4, axis=1)
            assert mode == "shared" or not (leader[leader >= 0] % 4).any()
            index = np.where(leader >= 0, leader + (np.arange(index.shape[1]) % 4 if mode == "quad" else 0), -1)
        assert index.max() < bits.size
        return np.where(index >= 0, bits[index], -1)

    def store(ref, index, value):
        index, value = np.broadcast_arrays(np.asarray(index), np.asarray(value))
        written = index[index >= 0]
        assert written.size == np.unique(written).size
        ref.array[written] = value[index >= 0]

    def count(ref, distance, span, shift, first):
        distance, shift, span = (np.asarray(x).astype(np.uint32).astype(np.int64) for x in (distance, shift, span))
        np.add.at(ref.array, (np.asarray(first) + (distance >> shift))[distance <= span], 1)

    def leading_zeros(value):
        return np.vectorize(lambda v: 32 - int(v).bit_length(), otypes=[np.int32])(np.asarray(value).astype(np.uint32))

    def ranks(flags, before):
        return cumsum(flags, 4) - flags + before

    def lane_max(values, parts):
        return np.stack([np.asarray(values)[:, part::parts].max(1) for part in range(parts)], 1)

    def while_loop(proceeds, body, state):
        while np.asarray(proceeds(state)).all():
            state = body(state)
        return state

    def cumsum(values, run):
        grouped = warps(np.asarray(values))
        grouped = grouped.reshape(len(grouped), 32, -1, run).transpose(0, 2, 1, 3)
        sums = grouped.reshape(len(grouped), -1).cumsum(1, dtype=np.int32).reshape(grouped.shape)
        return sums.transpose(0, 2, 1, 3).reshape(np.shape(values))

    def reduce(kind, values):
        join = {"add": functools.partial(np.sum, dtype=np.int32), "min": np.min, "max": np.max}[kind]
        return np.repeat(join(warps(np.asarray(values)), axis=(1, 2)), 32)[:, None]

    monkeypatch.setattr(plgpu, "kernel", kernel)
    monkeypatch.setattr(lax, "while_loop", while_loop)
    replaced = {"thread": numbers, "slots": slots, "sync": lambda: None, "load": load, "store": store}
    replaced |= {"count": count, "warp_cumsum": cumsum, "warp_reduce": reduce}
    replaced |= {"leading_zeros": leading_zeros, "lane_max": lane_max, "warp_ranks": ranks}
    for name, function in replaced.items():
        monkeypatch.setattr(lanes, name, function)


@pytest.fixture
def choose(monkeypatch):
    """masked_topk by the kernel (jitted, on a GPU) or by its emulation."""
    if not ON_GPU:
        emulated(monkeypatch)
        return mosaic_gpu.masked_topk
    return jax.jit(mosaic_gpu.masked_topk, static_argnames="k")


def check(choose, scores_RS, k, length_R=None):
    rows, width = scores_RS.shape
    length_R = np.asarray([width] * rows if length_R is None else length_R, np.int32)
    got = choose(jnp.asarray(scores_RS), jnp.asarray(length_R), k=k)
    np.testing.assert_array_equal(got, oracle(scores_RS, length_R, k))


def normal(rows, width, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("k", WANTED)
def test_the_best_positions_ascend(choose, width, k):
    check(choose, normal(2, width), k)


@pytest.mark.parametrize("width", (4001, 8321, 131071, 131072) if ON_GPU else (515,))
def test_of_equal_scores_the_lower_positions_win(choose, width):
    check(choose, np.full((1, width), 2.5, np.float32), LITTLE)
    check(choose, np.random.default_rng(1).integers(-2, 3, (2, width)).astype(np.float32), LITTLE)


def test_both_zeros_tie(choose):
    zeros = np.where(np.random.default_rng(2).random((2, BIG)) < 0.5, np.float32(0), np.float32(-0.0))
    zeros[:, ::97] = 1
    check(choose, zeros, LITTLE)


def test_nan_and_minus_infinity_are_never_chosen_and_infinity_may_be(choose):
    rng = np.random.default_rng(3)
    scores = normal(3, BIG)
    scores[rng.random(scores.shape) < 0.99] = -np.inf
    scores.view(np.uint32)[rng.random(scores.shape) < 0.1] = 0xFFC00001
    scores.view(np.uint32)[rng.random(scores.shape) < 0.1] = 0x7F800001
    scores[:, 5::1009] = np.inf
    scores[1] = -np.inf
    scores[2] = np.nan
    for k in (8, LITTLE, 2048):
        check(choose, scores, k)


def test_extreme_floats_order_exactly(choose):
    top = np.finfo(np.float32).max
    tiny = np.float32(1e-45)
    line = np.array([-top, -1, -2 * tiny, -tiny, -0.0, 0, tiny, 2 * tiny, 1, top, np.inf, -np.inf], np.float32)
    scores = np.random.default_rng(4).permutation(np.tile(line, 60))[None]
    for k in (1, 60, 150, 300, 659, 661, 700):
        check(choose, scores, k)


def test_fewer_than_k_very_negative_scores_are_all_chosen(choose):
    scores = np.full((1, 600), -np.inf, np.float32)
    scores[0, 100:400:3] = -3e38
    check(choose, scores, 150)
    check(choose, scores, 60)


def test_lengths_bound_the_choice(choose):
    border = (0, 1, 2, 3, 4, 5, 127, 128, 129, 511, 512, 513, 4000, 4001, 5000, -1)
    check(choose, normal(len(border), 4001), LITTLE, border)
    if ON_GPU:
        border = (0, 1, 7, 8, 9, 511, 32767, 32768, 32769, 131071, 131072, 2**31 - 1)
        check(choose, normal(len(border), 131072), 2048, border)


@pytest.mark.parametrize("levels", (1, 2))
def test_wide_rows_are_searched_by_levels(choose, monkeypatch, levels):
    monkeypatch.setitem(mosaic_gpu.TUNING, "hopper", mosaic_gpu.TUNING["hopper"] | {"keys": 512})
    scores = np.random.default_rng(5).integers(0, 40, (2, 1021 if levels == 1 else 4001)).astype(np.float32)
    k = 30 if levels == 1 else 100
    assert len(mosaic_gpu._blocks(scores.shape[1], k, 512)) == levels
    jax.clear_caches()
    for length in (scores.shape[1], 513, 40, 3):
        check(choose, scores, k, (length, length - 3))
    jax.clear_caches()


def test_the_emulation_sees_the_released_plan():
    assert mosaic_gpu._blocks(2**20, 512, 32768) == [32]
    assert mosaic_gpu._blocks(131072, 2048, 32768) == [8]
    assert mosaic_gpu._blocks(16384, 512, 32768) == []


SHAPES = [(1, 4096, 512), (2048, 16384, 512), (64, 2**20, 512), (8, 131072, 2048), (1, 2**20, 2048), (1, 1, 1)]
AWKWARD = [(3, 7, 2048), (1, 8321, 8), (2, 131071, 1000), (1, 32769, 1024), (1, 3 * 2**20 + 1, 100), (0, 64, 8)]


@pytest.mark.parametrize("x64", (False, True))
@pytest.mark.parametrize("shape", SHAPES + AWKWARD, ids=str)
def test_it_lowers_for_cuda(shape, x64):
    rows, width, k = shape

    def run(scores, length):
        return op.masked_topk(scores, length, k=k, implementation="mosaic_gpu")

    with jax.enable_x64(True) if x64 else contextlib.nullcontext():
        specs = jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)
        (out,) = jax.export.export(jax.jit(run), platforms=["cuda"])(*specs).out_avals
    assert out.shape == (rows, k) and out.dtype == jnp.int32


def test_what_it_cannot_serve_it_refuses_with_the_numbers():
    specs = jax.ShapeDtypeStruct((1, 2**20), jnp.float32), jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(NotImplementedError, match="k=9000 of 1048576"):
        jax.eval_shape(functools.partial(mosaic_gpu.masked_topk, k=9000), *specs)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        jax.eval_shape(functools.partial(mosaic_gpu.masked_topk, k=8), specs[0].update(dtype=jnp.bfloat16), specs[1])


@pytest.mark.skipif(not ON_GPU, reason="runs the kernel")
@pytest.mark.parametrize("width, k", [(4096, 512), (16384, 512), (131072, 2048), (1048576, 512)])
def test_on_a_gpu_calls_repeat_and_scans_x64_and_batches_change_nothing(width, k):
    scores = np.random.default_rng(6).integers(-50, 50, (4, width)).astype(np.float32)
    length = np.array([width, width - 1, width // 2, 5], np.int32)
    want = oracle(scores, length, k)
    run = jax.jit(functools.partial(op.masked_topk, k=k, implementation="mosaic_gpu"))
    for _ in range(5):
        np.testing.assert_array_equal(run(scores, length), want)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(run(scores, length), want)
    scanned = jax.jit(lambda *xs: lax.scan(lambda c, x: (c, run(*x)), 0, xs)[1])
    np.testing.assert_array_equal(scanned(scores, length), want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(functools.partial(op.masked_topk, k=k)))(scores, length), want)
