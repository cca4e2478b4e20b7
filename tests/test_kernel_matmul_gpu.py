"""The Hopper matmul and quantisers: lowered for every released shape; on a GPU, run against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_matmul import expert_matmul, mosaic_gpu
from pallas_kernels.quantize import DEQUANTIZE, QUANTIZE
from pallas_kernels.quantize import mosaic_gpu as quantizers

FP4, FP8, ENTRY = "fp4_e8m0_32", "fp8_e8m0_32x32", "fp4_e4m3_16"
X64 = pytest.mark.parametrize("x64", [False, True])
ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="wgmma and PTX need a Hopper GPU")

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn).astype(np.float64)
E8M0 = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256) - 127))
SUM_ERROR = 320 * 2.0**-24  # of the sum of magnitudes: tensor cores round each sum of 16 exact products, 320 of them


def planes(rng, experts, F, D, format):
    """Codes and scales of random weights, without NaN."""
    if format == FP4:
        codes = rng.integers(0, 256, (experts, F, D // 2), np.uint8)
        return codes, rng.integers(100, 140, (experts, F, D // 32), np.uint8)
    codes = rng.integers(0, 256, (experts, F, D), np.uint8)
    return np.where(codes & 127 == 127, 1, codes).astype(np.uint8), rng.integers(
        100, 140, (experts, F // 32, D // 32), np.uint8
    )


def decode(codes_FD, scales_FG, format):
    """One expert's weights in float64."""
    if format == FP4:
        values = E2M1[np.stack([codes_FD & 15, codes_FD >> 4], axis=-1).reshape(len(codes_FD), -1)]
        return values * np.repeat(E8M0[scales_FG], 32, axis=1)
    return E4M3[codes_FD] * np.repeat(np.repeat(E8M0[scales_FG], 32, axis=1), 32, axis=0)


def shapes(M, R, experts, F, D, format, dtype=jnp.bfloat16):
    """The arguments of one call."""
    codes = (experts, F, D // 2) if format == FP4 else (experts, F, D)
    scales = (experts, F, D // 32) if format == FP4 else (experts, F // 32, D // 32)
    kinds = ((M, R, D), dtype), (codes, jnp.uint8), (scales, jnp.uint8), ((M,), jnp.int32)
    return [jax.ShapeDtypeStruct(*kind) for kind in kinds]


def kernel(format):
    return jax.jit(functools.partial(expert_matmul, format=format, implementation="mosaic_gpu"))


RELEASED = [
    (6, 1, 384, 2304, 5120, FP4),
    (48, 1, 384, 5120, 2304, FP4),
    (150, 8, 384, 2304, 5120, FP4),
    (384, 128, 384, 5120, 2304, FP4),
    (1, 1, 1, 32768, 1280, FP8),
    (1, 8, 1, 1280, 5120, FP8),
    (1, 33, 1, 512, 5120, FP8),
    (1, 300, 1, 5120, 8192, FP8),
]


@pytest.mark.parametrize("M,R,experts,F,D,format", RELEASED)
@X64
def test_the_matmul_lowers_for_cuda(M, R, experts, F, D, format, x64):
    with jax.enable_x64(x64):
        exported = jax.export.export(kernel(format), platforms=["cuda"])(*shapes(M, R, experts, F, D, format))
    assert exported.out_avals == (jax.core.ShapedArray((M, R, F), jnp.float32),)


@pytest.mark.parametrize(
    "M,R,F,D,format,dtype",
    [
        (1, 1, 128, 128, FP4, jnp.float32),  # rows that are not bfloat16
        (1, 1, 100, 128, FP4, jnp.bfloat16),  # channels, columns that are no whole tiles
        (1, 1, 128, 160, FP4, jnp.bfloat16),
        (1, 1, 128, 128, FP8, jnp.bfloat16),
        (1, 1, 128, 32768, FP4, jnp.bfloat16),  # more scales than shared memory
        (1, 100000, 128, 256, FP8, jnp.bfloat16),  # decoding pays for itself in XLA
        (0, 1, 128, 128, FP4, jnp.bfloat16),
        (1, 0, 128, 128, FP4, jnp.bfloat16),
    ],
)
def test_what_the_matmul_cannot_serve_it_refuses(M, R, F, D, format, dtype):
    with pytest.raises(NotImplementedError):
        jax.eval_shape(kernel(format), *shapes(M, R, 2, F, D, format, dtype))


@pytest.mark.parametrize("format", [FP4, FP8])
def test_columns_meet_the_codes_that_a_thread_holds(format):
    """wgmma's column 16 s + 8 h + 2 c + e is code e of pair 2 s + h of thread c, whose bytes are 16 c to 16 c + 15."""
    pairs, tile = (4, 128) if format == FP4 else (2, 64)
    arranged = np.asarray(mosaic_gpu._arrange(jnp.arange(2 * tile)[None, None], pairs))[0, 0]
    for place, column in enumerate(arranged):
        step, half, thread, code = (place % tile) // 16, place // 8 % 2, place // 2 % 4, place % 2
        word, pair = divmod(2 * step + half, pairs)
        assert column == place // tile * tile + thread * tile // 4 + word * 2 * pairs + pair + code * pairs


CASES = [
    (1, 1, 2304, 5120, FP4),
    (5, 7, 5120, 2304, FP4),
    (6, 8, 512, 512, FP4),
    (2, 33, 192, 384, FP4),
    (2, 128, 128, 128, FP4),
    (1, 129, 64, 640, FP4),
    (1, 1, 512, 5120, FP8),
    (1, 8, 1280, 5120, FP8),
    (2, 33, 192, 768, FP8),
    (1, 300, 128, 256, FP8),
]


@ON_GPU
@pytest.mark.parametrize("M,R,F,D,format", CASES)
def test_the_matmul_is_the_float64_one(M, R, F, D, format):
    rng = np.random.default_rng(R)
    codes, scales = planes(rng, 4, F, D, format)
    expert = rng.integers(0, 3, M).astype(np.int32)
    expert[1:2] = -1
    codes[3], scales[3] = 0x7F, 255  # poison in an expert that no tile names
    x = np.asarray(jnp.asarray(rng.standard_normal((M, R, D)), jnp.bfloat16))
    got = np.asarray(kernel(format)(x, codes, scales, expert))
    for m in range(M):
        if expert[m] < 0:
            np.testing.assert_array_equal(got[m], 0)
            continue
        weights, rows = decode(codes[expert[m]], scales[expert[m]], format), x[m].astype(np.float64)
        assert np.all(np.abs(got[m] - rows @ weights.T) <= SUM_ERROR * (np.abs(rows) @ np.abs(weights).T))


@ON_GPU
@pytest.mark.parametrize("format", [FP4, FP8])
def test_every_scale_byte_decodes(format):
    rng = np.random.default_rng(0)
    codes, scales = planes(rng, 1, 64, 8192, format)
    codes &= 0xBB if format == FP4 else 0xBF  # below 2, which times the largest scale is finite
    scales[0, :, :] = np.arange(scales.shape[2])
    x = np.zeros((1, 1, 8192), jnp.bfloat16)
    for group in (0, 1, 126, 127, 128, 129, 134, 135, 200, 250, 254, 255):
        x[0, 0] = 0
        x[0, 0, group * 32 : (group + 1) * 32] = 2.0**-20 if group > 127 else 1
        x[0, 0, 255 * 32 :] = 0
        finite = scales.copy()
        finite[scales == 255] = 0 if group < 255 else 255
        got = np.asarray(kernel(format)(x, codes, finite, np.zeros(1, np.int32)))[0, 0]
        want = decode(codes[0], finite[0], format) @ x[0, 0].astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-37)  # float32 sums of 32 terms; subnormal results


@ON_GPU
@pytest.mark.parametrize("format,rows", [(FP4, slice(33, 34)), (FP8, slice(32, 64))])
def test_a_nan_scale_reaches_its_channels_only(format, rows):
    codes, scales = planes(np.random.default_rng(0), 1, 128, 256, format)
    scales[0, 33 if format == FP4 else 1, 5] = 255
    got = np.asarray(kernel(format)(np.ones((1, 3, 256), jnp.bfloat16), codes, scales, np.zeros(1, np.int32)))
    want = np.zeros(got.shape, bool)
    want[:, :, rows] = True
    np.testing.assert_array_equal(np.isnan(got), want)


@ON_GPU
def test_a_nan_code_reaches_its_channel_only():
    codes, scales = planes(np.random.default_rng(0), 1, 128, 256, FP8)
    codes[0, 5, 77], codes[0, 90, 255] = 0x7F, 0xFF
    got = np.asarray(kernel(FP8)(np.ones((1, 1, 256), jnp.bfloat16), codes, scales, np.zeros(1, np.int32)))
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(got[0, 0])), [5, 90])


@ON_GPU
@X64
def test_the_matmul_repeats_to_the_bit_in_a_scan(x64):
    rng = np.random.default_rng(0)
    codes, scales = planes(rng, 1, 512, 5120, FP8)
    x = jnp.asarray(rng.standard_normal((3, 1, 8, 5120)), jnp.bfloat16)
    expert = jnp.zeros((3, 1), jnp.int32)
    with jax.enable_x64(x64):

        def step(carry, work):
            return carry, kernel(FP8)(work[0], codes, scales, work[1])

        scanned = jax.jit(lambda x, e: jax.lax.scan(step, 0, (x, e))[1])(x, expert)
        for k in range(3):
            np.testing.assert_array_equal(scanned[k], kernel(FP8)(x[k], codes, scales, expert[k]))


def entries(rng, shape):
    """Rows of every size, with zeros, midpoints between codes, NaN and infinities."""
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal((*shape[:-1], 1)))
    flat = x.reshape(-1, shape[-1])
    for row, values in enumerate((0.0, 1e-5, 3e38, np.arange(shape[-1]) / 4, np.arange(shape[-1]) % 29 / 8, -0.0)):
        flat[row] = values
    flat[6, 3], flat[7, 40], flat[8, 41] = np.nan, np.inf, -np.inf
    return jnp.asarray(x, jnp.bfloat16)


@pytest.mark.parametrize("shape", [(1048576, 512), (3, 4001, 512), (33, 512)])
@X64
def test_the_quantisers_lower_for_cuda(shape, x64):
    def kind(n, dtype):
        return jax.ShapeDtypeStruct((*shape[:-1], n), dtype)

    with jax.enable_x64(x64):
        for turn in (None, (kind(32, jnp.float32),) * 2):
            quantize = jax.jit(functools.partial(quantizers.quantize, format=ENTRY))
            exported = jax.export.export(quantize, platforms=["cuda"])(kind(512, jnp.bfloat16), turn)
            assert [a.shape[-1] for a in exported.out_avals] == [256, 32]
        dequantize = jax.jit(functools.partial(quantizers.dequantize, format=ENTRY, dtype=jnp.bfloat16))
        exported = jax.export.export(dequantize, platforms=["cuda"])(kind(256, jnp.uint8), kind(32, jnp.uint8))
        assert exported.out_avals[0].shape == shape


@pytest.mark.parametrize(
    "shape,dtype,format",
    [((64, 512), jnp.float32, ENTRY), ((1, 512), jnp.bfloat16, ENTRY), ((64, 512), jnp.bfloat16, FP4)],
)
def test_what_the_quantisers_cannot_serve_they_refuse(shape, dtype, format):
    with pytest.raises(NotImplementedError):
        jax.eval_shape(functools.partial(quantizers.quantize, format=format), jax.ShapeDtypeStruct(shape, dtype))


@ON_GPU
@pytest.mark.parametrize("shape", [(64, 512), (4001, 512), (3, 43, 128)])
def test_quantised_bits_are_the_references(shape):
    x = entries(np.random.default_rng(0), shape)
    got = jax.jit(functools.partial(QUANTIZE["mosaic_gpu"], format=ENTRY))(x)
    want = jax.jit(functools.partial(QUANTIZE["reference"], format=ENTRY))(x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@ON_GPU
def test_every_byte_dequantises():
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (64, 256), np.uint8), np.arange(64 * 32).reshape(64, 32).astype(np.uint8)
    got = np.asarray(DEQUANTIZE["mosaic_gpu"](codes, scales, format=ENTRY, dtype=jnp.bfloat16)).astype(np.float64)
    values = E2M1[np.stack([codes & 15, codes >> 4], axis=-1).reshape(64, 512)]
    np.testing.assert_array_equal(got, values * np.repeat(E4M3[scales], 16, axis=1))


@ON_GPU
def test_rotated_entries_decode_within_a_step_of_the_reference():
    rng = np.random.default_rng(0)
    x, angle = jnp.asarray(rng.standard_normal((2, 65, 512)), jnp.bfloat16), jnp.asarray(rng.random((2, 65, 32)))
    turn = (jnp.cos(angle).astype(jnp.float32), jnp.sin(angle).astype(jnp.float32))
    (codes, scales), (want_codes, want_scales) = (
        jax.jit(functools.partial(QUANTIZE[name], format=ENTRY))(x, turn) for name in ("mosaic_gpu", "reference")
    )
    np.testing.assert_array_equal(codes[..., :224], want_codes[..., :224])
    assert np.mean(np.asarray(codes != want_codes)) < 1e-3  # the two products may round differently
    assert np.mean(np.asarray(scales != want_scales)) < 1e-3
