"""pallas_kernels.expert_matmul: the reference and the TPU kernel, interpreted, against float64 products."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.expert_matmul import expert_matmul

FP4, FP8 = "fp4_e8m0_32", "fp8_e8m0_32x32"
BACKENDS = pytest.mark.parametrize("backend", ["reference", "mosaic_tpu"])
BOTH = pytest.mark.parametrize("format", [FP4, FP8])
SUM_ERROR = 1e-6  # of the sum of magnitudes: products are exact, float32 sums of up to 1280 of them are not


def planes(rng, experts, F, D, format):
    """Codes and scales of random weights, without NaN."""
    if format == FP4:
        return rng.integers(0, 256, (experts, F, D // 2), np.uint8), rng.integers(
            100, 140, (experts, F, D // 32), np.uint8
        )
    codes = rng.integers(0, 256, (experts, F, D), np.uint8)
    scales = rng.integers(100, 140, (experts, -(-F // 32), D // 32), np.uint8)
    return np.where(codes & 127 == 127, 1, codes).astype(np.uint8), scales


def decode(codes_FD, scales_FG, format):
    """One expert's weights in float64."""
    if format == FP4:
        codes = np.stack([codes_FD & 15, codes_FD >> 4], axis=-1).reshape(len(codes_FD), -1)
        return oracle.E2M1[codes].astype(np.float64) * np.repeat(oracle.E8M0[scales_FG].astype(np.float64), 32, 1)
    scales = np.repeat(np.repeat(oracle.E8M0[scales_FG].astype(np.float64), 32, 1), 32, 0)[: len(codes_FD)]
    return oracle.E4M3[codes_FD].astype(np.float64) * scales


def run(backend, x, codes, scales, expert, format, x64=False):
    with jax.enable_x64(x64), pltpu.force_tpu_interpret_mode():
        expert = None if expert is None else jnp.asarray(expert, jnp.int32)
        arrays = jnp.asarray(x, jnp.bfloat16), *map(jnp.asarray, (codes, scales)), expert
        got = expert_matmul(*arrays, format=format, implementation=backend)
    assert got.dtype == jnp.float32
    return np.asarray(got)


def bfloat16(rng, shape):
    return np.array(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16).astype(jnp.float32))


@BACKENDS
@pytest.mark.parametrize(
    "expert,R,F,D,format,x64",
    [
        ([2], 1, 7, 256, FP4, False),
        ([-1, 2, 2, -1, 0, -1], 1, 200, 512, FP4, True),
        ([1, -1, 1], 7, 130, 256, FP4, False),
        ([0, 1], 16, 128, 256, FP4, True),
        ([1, 1, -1, 0], 17, 300, 512, FP4, True),
        ([2], 300, 129, 256, FP4, False),  # a part-filled block of rows
        ([-1, -1], 1, 64, 256, FP4, False),
        ([0], 1, 520, 1280, FP8, True),
        ([1, -1, 0], 5, 33, 256, FP8, False),
        ([-1, 2, 2], 33, 100, 256, FP8, True),
    ],
)
def test_the_matmul_is_the_float64_one(backend, expert, R, F, D, format, x64):
    rng = np.random.default_rng(R)
    codes, scales = planes(rng, 4, F, D, format)
    codes[3], scales[3] = 0x7F, 255  # NaN in an expert that no tile names
    x = bfloat16(rng, (len(expert), R, D))
    x[np.asarray(expert) < 0] = np.nan
    got = run(backend, x, codes, scales, expert, format, x64)
    assert got.shape == (len(expert), R, F)
    for m, e in enumerate(expert):
        if e < 0:
            np.testing.assert_array_equal(got[m], 0)
            continue
        weight, rows = decode(codes[e], scales[e], format), x[m].astype(np.float64)
        assert np.all(np.abs(got[m] - rows @ weight.T) <= SUM_ERROR * (np.abs(rows) @ np.abs(weight).T))


@BACKENDS
@BOTH
@pytest.mark.parametrize("few", [True, False])
def test_every_code_and_channel_decodes_exactly(backend, format, few):
    # A row with a single 1 picks one channel of the weights.
    codes = np.arange(128 * (128 if format == FP4 else 256)).reshape(1, 128, -1) % 251 + np.arange(128)[:, None]
    codes = (codes % 256).astype(np.uint8)
    codes = codes if format == FP4 else np.where(codes & 127 == 127, 1, codes).astype(np.uint8)
    scales = (90 + np.arange(128 * 8 if format == FP4 else 32) % 75).reshape(1, -1, 8).astype(np.uint8)
    weight = decode(codes[0], scales[0], format)
    if few:
        x, tiles = np.eye(256).reshape(16, 16, 256), np.zeros(16)
    else:
        x, tiles = np.eye(256)[None], np.zeros(1)
    got = run(backend, x, codes, scales, tiles, format).reshape(256, 128)
    np.testing.assert_array_equal(got, weight.T)


@BACKENDS
@BOTH
@pytest.mark.parametrize("R", [1, 3, 20])
def test_a_nan_scale_reaches_its_outputs_only(backend, format, R):
    codes, scales = planes(np.random.default_rng(0), 1, 128, 256, format)
    scales[0, 33 if format == FP4 else 1, 5] = 255
    got = run(backend, np.ones((1, R, 256)), codes, scales, [0], format)
    spoilt = np.zeros(got.shape, bool)
    spoilt[:, :, slice(33, 34) if format == FP4 else slice(32, 64)] = True
    np.testing.assert_array_equal(np.isnan(got), spoilt)


@BACKENDS
@pytest.mark.parametrize("R", [2, 20])
def test_nan_codes_reach_their_outputs_and_nan_rows_themselves_only(backend, R):
    codes, scales = planes(np.random.default_rng(0), 1, 128, 256, FP8)
    codes[0, 5, 77], codes[0, 90, 255] = 0x7F, 0xFF
    x = np.ones((1, R, 256))
    x[0, 1, 200] = np.nan
    got = run(backend, x, codes, scales, [0], FP8)
    spoilt = np.zeros(got.shape, bool)
    spoilt[..., [5, 90]] = spoilt[0, 1] = True
    np.testing.assert_array_equal(np.isnan(got), spoilt)


@BACKENDS
@pytest.mark.parametrize("R", [1, 20])
def test_a_tile_gives_the_same_bits_whatever_stands_beside_it(backend, R):
    rng = np.random.default_rng(0)
    codes, scales = planes(rng, 3, 128, 256, FP4)
    x, expert = bfloat16(rng, (4, R, 256)), np.array([0, 2, 2, 1])
    whole = run(backend, x, codes, scales, expert, FP4)
    np.testing.assert_array_equal(run(backend, x, codes, scales, expert, FP4), whole)
    np.testing.assert_array_equal(run(backend, x[::-1], codes, scales, expert[::-1], FP4)[::-1], whole)
    np.testing.assert_array_equal(run(backend, x[2:3], codes, scales, expert[2:3], FP4), whole[2:3])


@BACKENDS
def test_tiles_without_numbers_are_the_experts_in_order(backend):
    rng = np.random.default_rng(1)
    codes, scales = planes(rng, 3, 128, 256, FP8)
    x = bfloat16(rng, (3, 2, 256))
    np.testing.assert_array_equal(
        run(backend, x, codes, scales, None, FP8), run(backend, x, codes, scales, [0, 1, 2], FP8)
    )
    with pytest.raises(ValueError, match="2 tiles for 3 experts; give expert_M"):
        run(backend, x[:2], codes, scales, None, FP8)


@pytest.mark.parametrize("x64", [False, True])
def test_the_kernel_runs_inside_scan_and_vmap(x64):
    rng = np.random.default_rng(0)
    codes, scales = planes(rng, 2, 128, 256, FP8)
    x, expert = bfloat16(rng, (3, 2, 1, 1, 256)), rng.integers(-1, 2, (3, 2, 1)).astype(np.int32)

    @sequential_vmap  # as the dispatcher maps it
    def multiply(x, expert):
        return expert_matmul(x, codes, scales, expert, format=FP8, implementation="mosaic_tpu")

    with jax.enable_x64(x64), pltpu.force_tpu_interpret_mode():
        work = jnp.asarray(x, jnp.bfloat16), jnp.asarray(expert)
        got = jax.jit(lambda work: jax.lax.scan(lambda c, w: (c, jax.vmap(multiply)(*w)), 0, work)[1])(work)
    for i in np.ndindex(3, 2):
        np.testing.assert_array_equal(got[i], run("mosaic_tpu", x[i], codes, scales, expert[i], FP8))


@BACKENDS
@pytest.mark.parametrize("M,R", [(0, 1), (2, 0)])
def test_a_product_of_nothing(backend, M, R):
    codes, scales = planes(np.random.default_rng(0), 2, 128, 256, FP4)
    assert run(backend, np.zeros((M, R, 256)), codes, scales, np.zeros(M), FP4).shape == (M, R, 128)


@pytest.mark.parametrize(
    "change,message",
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"D": 320}, "320 channels"),
        ({"format": None}, "None"),
        ({"format": "fp4_e4m3_16"}, "fp4_e4m3_16"),
        ({"D": 2**20, "R": 256}, "256 rows of 1048576 channels"),
    ],
)
def test_the_kernel_refuses_what_it_cannot_serve(change, message):
    at = {"R": 1, "D": 256, "dtype": jnp.bfloat16, "format": FP4} | change
    shapes = [((1, at["R"], at["D"]), at["dtype"]), ((1, 8, at["D"] // 2), jnp.uint8)]
    shapes += [((1, 8, at["D"] // 32), jnp.uint8), ((1,), jnp.int32)]

    def multiply(*arrays):
        return expert_matmul(*arrays, format=at["format"], implementation="mosaic_tpu")

    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(multiply, *(jax.ShapeDtypeStruct(*s) for s in shapes))
