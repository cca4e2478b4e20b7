"""pallas_kernels.quantize: the reference and the TPU kernels, interpreted, against NumPy loops, to the bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.custom_batching import sequential_vmap
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantize import dequantize, quantize

BACKENDS = pytest.mark.parametrize("backend", ["reference", "mosaic_tpu"])
FORMATS = pytest.mark.parametrize("format", ["fp8_e8m0_32", "fp4_e8m0_32", "fp4_e4m3_16"])
ONE_STEP = 1e-2  # share of rotated codes that may move by a step: products rounded to bfloat16 the other way


def rows_of_every_kind(rng, shape):
    """Of every size, with zeros of both signs, midpoints between codes, and what exceeds a format; all bfloat16."""
    x = rng.standard_normal(shape) * np.exp(4 * rng.standard_normal((*shape[:-1], 1)))
    flat, n = x.reshape(-1, shape[-1]), np.arange(shape[-1])
    kinds = [0 * n, -0.0 * n, 0 * n + 1e-5, 0 * n + 3e38, n / 4, n % 29 / 8, n % 9 * 2.0**-9, 448 * (n % 2), -(n % 7)]
    for row, kind in zip(flat, kinds, strict=False):
        row[:] = kind
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))


def run(operation, x64, *arrays, **static):
    with jax.enable_x64(x64), pltpu.force_tpu_interpret_mode():
        return jax.tree.map(np.asarray, operation(*jax.tree.map(jnp.asarray, arrays), **static))


def quantized(x, format):
    """Codes, nibbles packed, and scales as the definition has them."""
    with np.errstate(over="ignore"):  # 3e38 decodes to more
        codes, scales, _ = oracle.quantize(x.reshape(-1, x.shape[-1]), format)
    codes = oracle.pack(codes) if format.startswith("fp4") else codes
    return codes.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1)


@FORMATS
@pytest.mark.parametrize("shape,dtype,x64", [((1, 512), jnp.bfloat16, True), ((7, 3, 64), jnp.float32, False)])
def test_few_rows_quantise_as_the_definition(format, shape, dtype, x64):
    x = rows_of_every_kind(np.random.default_rng(0), shape)
    for got, want in zip(run(quantize, x64, x.astype(dtype), format=format), quantized(x, format), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "format,shape,dtype,x64",
    [
        ("fp8_e8m0_32", (257, 128), jnp.bfloat16, False),
        ("fp8_e8m0_32", (2, 300, 128), jnp.float32, True),
        ("fp4_e8m0_32", (3, 100, 128), jnp.bfloat16, True),  # sequences too short to stay apart
        ("fp4_e8m0_32", (1025, 128), jnp.float32, False),  # a second grid step with one row
        ("fp4_e4m3_16", (300, 256), jnp.bfloat16, False),
        ("fp4_e4m3_16", (260, 128), jnp.float32, True),
    ],
)
def test_the_kernel_quantises_as_the_definition(format, shape, dtype, x64):
    x = rows_of_every_kind(np.random.default_rng(0), shape)
    got = run(quantize, x64, x.astype(dtype), format=format, implementation="mosaic_tpu")
    for a, b in zip(got, quantized(x, format), strict=True):
        assert a.dtype == np.uint8
        np.testing.assert_array_equal(a, b)


@BACKENDS
@FORMATS
def test_nan_and_inf_spoil_their_group_only(backend, format):
    x = np.random.default_rng(0).standard_normal((256, 128)).astype(np.float32)
    clean = run(quantize, False, x, format=format, implementation=backend)
    group = oracle.FORMATS[format][3]
    spoilt = np.zeros((256, 128 // group), bool)
    for row, channel, value in ((0, 3, np.nan), (130, 40, np.inf), (255, 127, -np.inf), (7, 64, -np.nan)):
        x[row, channel] = value
        spoilt[row, channel // group] = True
    codes, scales = run(quantize, False, x, format=format, implementation=backend)
    nan = 0x7F if format == "fp4_e4m3_16" else 255
    np.testing.assert_array_equal(scales, np.where(spoilt, nan, clean[1]))
    beside = ~np.repeat(spoilt, codes.shape[1] // spoilt.shape[1], 1)
    np.testing.assert_array_equal(codes[beside], clean[0][beside])
    values = run(dequantize, False, codes, scales, format=format, dtype=jnp.float32, implementation=backend)
    np.testing.assert_array_equal(np.isnan(values), np.repeat(spoilt, group, 1))


@BACKENDS
@FORMATS
def test_rotated_rows_quantise_within_a_step_of_the_definition(backend, format):
    rng = np.random.default_rng(0)
    x = np.asarray(jnp.asarray(rng.standard_normal((2, 130, 128)), jnp.bfloat16).astype(jnp.float32))
    angle = rng.random((2, 130, 32))
    rotation = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    turned = x.astype(np.float64)
    for pair in range(32):
        even, odd = x[..., 64 + 2 * pair].astype(np.float64), x[..., 65 + 2 * pair].astype(np.float64)
        cos, sin = (a[..., pair].astype(np.float64) for a in rotation)
        turned[..., 64 + 2 * pair], turned[..., 65 + 2 * pair] = even * cos - odd * sin, even * sin + odd * cos
    turned = np.asarray(jnp.asarray(turned, jnp.bfloat16).astype(jnp.float32))
    got = run(quantize, False, x.astype(jnp.bfloat16), rotation, format=format, implementation=backend)
    want = quantized(turned, format)
    for a, b in zip(got, want, strict=True):
        half = a.shape[-1] // 2
        np.testing.assert_array_equal(a[..., :half], b[..., :half])
        assert np.mean(a != b) < ONE_STEP


@BACKENDS
@pytest.mark.parametrize(
    "format,shape,dtype,x64",
    [
        ("fp8_e8m0_32", (4001, 128), jnp.float32, False),
        ("fp8_e8m0_32", (256, 256), jnp.bfloat16, True),
        ("fp4_e8m0_32", (2, 260, 128), jnp.bfloat16, False),
        ("fp4_e4m3_16", (260, 512), jnp.float32, True),
        ("fp4_e4m3_16", (3, 99, 128), jnp.bfloat16, False),
    ],
)
def test_every_byte_decodes_exactly(backend, format, shape, dtype, x64):
    table, _, scale_format, group, _ = oracle.FORMATS[format]
    packed = 2 if len(table) == 16 else 1
    codes = (np.arange(np.prod(shape) // packed) % 253).reshape(*shape[:-1], -1)
    codes = (codes + np.arange(codes.shape[-1]) // 3).astype(np.uint8)
    # E8M0 above 2^-100 only: subnormal products are read as 0.
    scales = np.arange(np.prod(shape) // group).reshape(*shape[:-1], -1)
    scales = (scales % 256 if scale_format == "e4m3" else 27 + scales % 229).astype(np.uint8)
    got = run(dequantize, x64, codes, scales, format=format, dtype=dtype, implementation=backend)
    assert got.dtype == dtype
    values = table[codes] if packed == 1 else table[np.stack([codes & 15, codes >> 4], -1).reshape(shape)]
    scale = (oracle.E4M3 if scale_format == "e4m3" else oracle.E8M0)[scales]
    with np.errstate(over="ignore", invalid="ignore"):
        want = values * np.repeat(scale, group, -1)
    np.testing.assert_array_equal(got.astype(np.float32), want)


@pytest.mark.parametrize("x64", [False, True])
def test_the_kernels_repeat_to_the_bit_inside_scan_and_vmap(x64):
    x = np.random.default_rng(0).standard_normal((2, 2, 256, 128)).astype(np.float32)
    static = {"format": "fp4_e4m3_16", "implementation": "mosaic_tpu"}

    @sequential_vmap  # as the dispatcher maps it
    def there_and_back(x):
        planes = quantize(x, **static)
        return *planes, dequantize(*planes, dtype=jnp.float32, **static)

    with jax.enable_x64(x64), pltpu.force_tpu_interpret_mode():
        run_all = jax.jit(lambda xs: jax.lax.scan(lambda c, x: (c, jax.vmap(there_and_back)(x)), 0, xs)[1])
        got = run_all(jnp.asarray(x))
    for i in np.ndindex(2, 2):
        codes, scales = run(quantize, x64, x[i], **static)
        values = run(dequantize, x64, codes, scales, dtype=jnp.float32, **static)
        for a, b in zip(got, (codes, scales, values), strict=True):
            np.testing.assert_array_equal(a[i], b)


@FORMATS
def test_no_rows_give_no_rows(format):
    codes, scales = quantize(jnp.zeros((0, 128), jnp.float32), format=format)
    assert (codes.shape[0], scales.shape[0]) == (0, 0)
    assert dequantize(codes, scales, format=format, dtype=jnp.float32).shape == (0, 128)


@pytest.mark.parametrize(
    "shape,dtype,format,message",
    [
        ((255, 128), jnp.float32, "fp4_e8m0_32", "255 rows"),
        ((256, 192), jnp.float32, "fp4_e8m0_32", "192 channels"),
        ((256, 128), jnp.float16, "fp4_e8m0_32", "float16"),
        ((256, 128), jnp.float32, "fp8_e8m0_32x32", "groups of 32 rows"),
    ],
)
def test_the_kernels_refuse_what_they_cannot_serve(shape, dtype, format, message):
    into = functools.partial(quantize, format=format, implementation="mosaic_tpu")
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(into, jax.ShapeDtypeStruct(shape, dtype))
