"""Block formats: bits, scales, gradients, and products with stored weights."""

import collections
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from golden_data import vectors
from jaxprs import equations

from pallas_kernels import formats as bits
from pallas_kernels.blocks import by_query_block
from v41jax import config, model, quant, tree
from v41jax.layers import project, rms_norm
from v41jax.quant import Packed

CACHE_FORMATS = ("fp8_e8m0_32", "fp4_e8m0_32", "fp4_e4m3_16")
DOT_ULPS = 32  # float32 sums of 128 products, in another order: about sqrt(128) roundings of the largest partial sum
BIAS_SIGMAS = 4  # of the mean rounding error; the seed is fixed, so the chance of 1e-4 is taken once


jitted_quantize = jax.jit(quant.quantize, static_argnums=1)
jitted_dequantize = jax.jit(quant.dequantize, static_argnums=1)


def same_bits(got, want):
    """Equal as floats, the signs of zeros included; NaN equals NaN."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))


MODES = pytest.mark.parametrize("jit,x64", [(False, False), (True, False), (True, True)])


# ---- bits


@MODES
def test_every_code_decodes_as_ml_dtypes(jit, x64):
    with jax.enable_x64(x64):
        wrap = jax.jit if jit else lambda f: f
        same_bits(wrap(bits.decode_e2m1)(jnp.arange(16, dtype=jnp.uint8)), oracle.E2M1)
        same_bits(wrap(bits.decode_e4m3)(jnp.arange(256, dtype=jnp.uint8)), oracle.E4M3)
        same_bits(wrap(bits.decode_e8m0)(jnp.arange(256, dtype=jnp.uint8)), oracle.E8M0)


def test_bytes_that_shortcuts_get_wrong():
    scale = jax.jit(bits.decode_e8m0)(jnp.array([0, 1, 120, 134, 254, 255], jnp.uint8))
    same_bits(scale, [2.0**-127, 2.0**-126, 2.0**-7, 128, 2.0**127, np.nan])
    value = jax.jit(bits.decode_e4m3)(jnp.array([0x01, 0x80, 0x7E, 0x7F, 0xFF], jnp.uint8))
    same_bits(value, [2.0**-9, -0.0, 448, np.nan, np.nan])


ENCODERS = {"e2m1": (bits.encode_e2m1, oracle.E2M1), "e4m3": (bits.encode_e4m3, oracle.E4M3)}


@pytest.mark.parametrize("element", ENCODERS)
def test_encode_every_half_precision_value(element):
    encode, table = ENCODERS[element]
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[~np.isnan(x)].astype(np.float32)
    np.testing.assert_array_equal(jax.jit(encode)(x), oracle.encode(x, table))


@pytest.mark.parametrize("element", ENCODERS)
def test_encode_ties_their_neighbours_and_random_values(element):
    encode, table = ENCODERS[element]
    sizes = np.unique(table[table >= 0])
    ties = (sizes[1:] + sizes[:-1]) / 2  # exact: two significant bits more than a code
    near = np.concatenate([sizes, ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    rng = np.random.default_rng(0)
    dense = rng.standard_normal(4000).astype(np.float32) * 2.0 ** rng.integers(-12, 10, 4000).astype(np.float32)
    extreme = np.array([0, 1e-45, 1e-38, 3e38, np.inf], np.float32)
    x = np.concatenate([near, dense, extreme]).astype(np.float32)
    x = np.concatenate([x, -x])
    np.testing.assert_array_equal(jax.jit(encode)(x), oracle.encode(x, table))


def test_encode_nan():
    nan = jnp.array([np.nan, -np.nan], jnp.float32)
    assert np.isnan(bits.decode_e4m3(jax.jit(bits.encode_e4m3)(nan))).all()
    np.testing.assert_array_equal(
        jax.jit(bits.encode_e2m1)(nan) & 7, [7, 7]
    )  # no NaN there: the scale of the group shows it


@functools.cache
def binade(exponent: int):
    """All 2^23 float32 values of [2^exponent, 2^(exponent + 1))."""
    return (np.uint32((127 + exponent) << 23) + np.arange(2**23, dtype=np.uint32)).view(np.float32)


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_e8m0_scale_of_every_mantissa_is_that_of_a_true_division(largest):
    # XLA would turn the division by a constant into a multiplication by its rounded inverse.
    amax = binade(3)
    quotient = (amax / np.float32(largest)).view(np.uint32)
    want = (quotient >> 23) + ((quotient & 0x7FFFFF) != 0)
    got = jax.jit(functools.partial(bits.encode_e8m0_ceil, largest=largest))(amax)
    np.testing.assert_array_equal(got, want.astype(np.uint8))


@pytest.mark.parametrize("exponent", [3, -5])  # normal and subnormal scales
def test_e4m3_scale_of_every_mantissa_is_that_of_a_true_division(exponent):
    amax = binade(exponent)
    want = (amax / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    got = jax.jit(functools.partial(bits.encode_e4m3_scale, largest=6.0))(amax)
    np.testing.assert_array_equal(got, want)


def test_nibbles():
    codes = np.arange(16, dtype=np.uint8)
    packed = jax.jit(bits.pack_nibbles)(codes)
    assert packed[0] == 0x10  # the even channel is low
    np.testing.assert_array_equal(packed, oracle.pack(codes))
    np.testing.assert_array_equal(bits.unpack_nibbles(packed), codes)


# ---- groups and scales


@MODES
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_quantize_equals_the_release(format, jit, x64):
    golden = vectors()
    with jax.enable_x64(x64):
        wrap = functools.partial(jax.jit, static_argnums=1) if jit else lambda f: f
        packed = wrap(quant.quantize)(golden["quant.x"], format)
        decode_scale = bits.decode_e4m3 if "e4m3" in format else bits.decode_e8m0
        code_name = "codes" if format.startswith("fp8") else "packed"
        np.testing.assert_array_equal(packed.codes, golden[f"quant.{format}.{code_name}"])
        same_bits(decode_scale(packed.scales), golden[f"quant.{format}.scale"])
        decoded = wrap(quant.dequantize)(packed, jnp.float32)
        if format.startswith("fp4"):
            same_bits(decoded, golden[f"quant.{format}.dequant"])
        assert packed.codes.dtype == packed.scales.dtype == jnp.uint8
        assert decoded.dtype == jnp.float32


@pytest.mark.parametrize("format,shape", [*((f, (24, 96)) for f in CACHE_FORMATS), ("fp8_e8m0_32x32", (40, 72))])
def test_quantize_equals_the_oracle(format, shape):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-10, 8, (shape[0], 1))).astype(np.float32)
    codes, scales, decoded = oracle.quantize(x, format)
    packed = jitted_quantize(jnp.asarray(x), format)
    np.testing.assert_array_equal(packed.scales, scales)
    np.testing.assert_array_equal(packed.codes, oracle.pack(codes) if format.startswith("fp4") else codes)
    same_bits(jitted_dequantize(packed, jnp.float32), decoded)
    abstract = quant.abstract(shape, format)
    assert (abstract.codes.shape, abstract.scales.shape) == (packed.codes.shape, packed.scales.shape)


@pytest.mark.parametrize("rows", [1, 64])  # loops of other lengths divide by other instructions
def test_nv_values_are_divided_by_the_scale_exactly(rows):
    # Values a few ulps around every rounding tie, for every mantissa a scale can have. A multiplication by the
    # rounded inverse of the scale would move some of them across.
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)
    groups = []
    for scale in oracle.E4M3[64:72]:
        near = np.concatenate([(ties * scale).view(np.int32) + ulps for ulps in range(-7, 8)]).view(np.float32)
        groups += [np.concatenate([part, [6 * scale]]) for part in near.reshape(-1, 15)]
    x = np.concatenate(groups).astype(np.float32)[None]
    codes, scales, _ = oracle.quantize(x, "fp4_e4m3_16")
    packed = jitted_quantize(np.tile(x, (rows, 1)), "fp4_e4m3_16")
    np.testing.assert_array_equal(packed.scales, np.tile(scales, (rows, 1)))
    np.testing.assert_array_equal(packed.codes, np.tile(oracle.pack(codes), (rows, 1)))


def round_trip(values, format):
    return np.asarray(jitted_dequantize(jitted_quantize(jnp.asarray(values, jnp.float32), format), jnp.float32))


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_zeros_stay_zeros_with_a_finite_scale(format):
    packed = jitted_quantize(jnp.zeros((1, 32)), format)
    same_bits(jitted_dequantize(packed, jnp.float32), np.zeros((1, 32)))
    same_bits(round_trip([[-0.0] * 32], format), np.full((1, 32), -0.0))
    gradient = jax.jit(jax.grad(lambda x: quant.fake_quantize(x, format).sum()))(jnp.zeros((1, 32)))
    np.testing.assert_array_equal(gradient, np.ones((1, 32)))


def test_a_value_that_rounds_to_zero_keeps_its_sign():
    for format in CACHE_FORMATS:
        x = [6.0, -1e-3 * 2.0**-10, 1e-3 * 2.0**-10] + [0.0] * 29
        same_bits(round_trip([x], format)[0, 1:3], [-0.0, 0.0])


def test_mx_scale_is_rounded_up():
    # amax / 6 = 1.2: a cast to E8M0 would give 1 and clip to 6.
    packed = jitted_quantize(jnp.full((32,), 7.2), "fp4_e8m0_32")
    assert packed.scales[0] == 128
    np.testing.assert_array_equal(round_trip([7.2] * 32, "fp4_e8m0_32"), np.full(32, 8.0))


@pytest.mark.parametrize("amax", [0.00586, 0.0059])
def test_tiny_nv_group_uses_the_least_scale(amax):
    # amax / 6 would round to an E4M3 zero, and then x / 0.
    packed = jitted_quantize(jnp.full((16,), amax), "fp4_e4m3_16")
    assert packed.scales[0] == 1
    np.testing.assert_array_equal(round_trip([amax] * 16, "fp4_e4m3_16"), np.full(16, 3 * 2.0**-9))


@pytest.mark.parametrize("ratio", [464.0, 464.1, 480.0, 1e30])
def test_nv_scale_is_clipped_to_448(ratio):
    packed = jitted_quantize(jnp.full((16,), 6 * ratio), "fp4_e4m3_16")
    assert packed.scales[0] == 0x7E
    np.testing.assert_array_equal(jitted_dequantize(packed, jnp.float32), np.full(16, 6 * 448.0))


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_stay_visible_in_their_group(format, bad):
    x = np.ones((3, 32), np.float32)
    x[1, 5] = bad
    group = oracle.FORMATS[format][3]
    decoded = round_trip(x, format)
    assert np.isnan(decoded[1, :group]).all()
    np.testing.assert_array_equal(np.isnan(decoded).sum(), group)


def test_bytes_of_a_token():
    sizes = [("fp4_e4m3_16", 512, 288), ("fp4_e8m0_32", 128, 68), ("fp8_e8m0_32", 512, 528)]
    for format, width, nbytes in sizes:
        token = jax.eval_shape(lambda x, f=format: quant.quantize(x, f), jnp.zeros((1, width)))
        assert token.nbytes == nbytes


def test_format_none_keeps_float32():
    x = jnp.array([[1e-30, 3.14159]], jnp.float32)
    packed = jitted_quantize(x, None)
    same_bits(jitted_dequantize(packed, jnp.float32), x)
    assert packed.scales.shape == (1, 0)


def test_partial_groups_are_refused():
    with pytest.raises(ValueError, match="40 channels are not whole groups of 32"):
        quant.quantize(jnp.zeros((2, 40)), "fp8_e8m0_32")


@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_error_is_half_a_step_and_unbiased(format):
    table, unsigned, _, group, _ = oracle.FORMATS[format]
    x = np.random.default_rng(2).standard_normal((512, 128)).astype(np.float32)
    packed = jitted_quantize(jnp.asarray(x), format)
    decoded = np.asarray(jitted_dequantize(packed, jnp.float32))
    scale_table = oracle.E4M3 if "e4m3" in format else oracle.E8M0
    scaled = np.abs(x) / np.repeat(scale_table[np.asarray(packed.scales)], group, -1)
    sizes = table[:unsigned]
    step = np.diff(sizes)[np.clip(np.searchsorted(sizes, scaled) - 1, 0, unsigned - 2)]
    error = np.abs(decoded - x) / np.repeat(scale_table[np.asarray(packed.scales)], group, -1)
    # Rounded to nearest: half a step. The division adds one rounding of the quotient.
    assert np.all(error <= step / 2 + scaled * 2.0**-23)
    signed = decoded.astype(np.float64) - x
    assert abs(signed.mean()) < BIAS_SIGMAS * signed.std() / np.sqrt(signed.size)
    same_bits(round_trip(-x, format), -decoded)


def test_bfloat16_holds_every_decoded_value():
    codes = np.tile(bits.pack_nibbles(jnp.arange(16, dtype=jnp.uint8)), (127, 1))
    packed = Packed(jnp.asarray(codes), jnp.arange(127, dtype=jnp.uint8)[:, None], "fp4_e4m3_16")
    wide, narrow = (jitted_dequantize(packed, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    assert narrow.dtype == jnp.bfloat16
    same_bits(narrow.astype(jnp.float32), wide)


# ---- fake quantisation


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("format", CACHE_FORMATS)
def test_fake_quantize_is_the_round_trip(format, dtype):
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, 64)), dtype)
    got = jax.jit(quant.fake_quantize, static_argnums=1)(x, format)
    assert got.dtype == dtype
    same_bits(got.astype(jnp.float32), oracle.quantize(np.asarray(x, np.float32), format)[2])
    assert quant.fake_quantize(x, None) is x


@pytest.mark.parametrize("format", CACHE_FORMATS)
@pytest.mark.parametrize("cotangent", [1000.0, 1e-4])
def test_gradient_is_straight_through(format, cotangent):
    # A cast pair would quantise the cotangent too: 1000 to NaN, 1e-4 to 0.
    def loss(x):
        step = jax.checkpoint(lambda carry, _: (quant.fake_quantize(carry, format), None))
        return (jax.lax.scan(step, x, length=3)[0] * cotangent).sum()

    x = jnp.concatenate([jnp.array([0.1, 7.0]), jnp.linspace(-5, 5, 30)])
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), np.full(32, np.float32(cotangent)))


def test_tangents_pass_unchanged():
    x = jnp.linspace(-3, 3, 32)
    push = jax.jit(lambda x, v: jax.jvp(lambda x: quant.fake_quantize(x, "fp4_e4m3_16"), (x,), (v,)))
    _, tangent = push(x, x * 1e3)
    np.testing.assert_array_equal(tangent, x * 1e3)


@pytest.mark.parametrize("format", [*CACHE_FORMATS, "fp8_e8m0_32x32"])
def test_nothing_rounds_by_a_cast(format):
    # On GPU XLA removes a pair of casts, and CPU tests would not see it.
    x = jnp.ones((32, 32))
    casts = [e.params["new_dtype"] for e in equations(lambda x: quant.fake_quantize(x, format), x)
             if e.primitive.name == "convert_element_type"]  # fmt: skip
    assert casts and all(jnp.dtype(d).itemsize > 1 or d == jnp.uint8 for d in casts)


# ---- products with stored weights


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=DOT_ULPS * 2.0**-24 * np.abs(want).max())


STORED = {"fp8": ("fp8_e8m0_32x32", "y_w8a8"), "fp4": ("fp4_e8m0_32", "y_w4a8")}


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("activation", [None, "fp8_e8m0_32"])
def test_project_equals_the_release(kind, activation):
    golden, (format, rounded) = vectors(), STORED[kind]
    weight = Packed(*(jnp.asarray(golden[f"linear.{kind}.{plane}"]) for plane in ("weight", "scale")), format)
    run = jax.jit(functools.partial(project, activation=activation))
    close(run(golden["linear.x"], weight), golden[f"linear.{kind}.{rounded if activation else 'y_dequant'}"])


def test_project_keeps_dtypes():
    x = jnp.ones((2, 32), jnp.bfloat16)
    packed = jitted_quantize(jnp.ones((32, 32)), "fp8_e8m0_32x32")
    for weight in (packed, jnp.ones((32, 32), jnp.bfloat16), jnp.ones((32, 32), jnp.float32)):
        assert jax.eval_shape(project, x, weight).dtype == jnp.bfloat16
        assert jax.eval_shape(functools.partial(project, dtype=jnp.float32), x, weight).dtype == jnp.float32


def test_only_the_released_tensors_are_stored_in_blocks():
    stored = collections.defaultdict(set)
    for path, spec in tree.walk(model.specs(config.v41_flash)):
        if spec.format is not None:
            stored[spec.format].add(".".join(path.split(".")[2:]))
    attention = {f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")}
    shared = {f"ffn.shared_experts.{name}" for name in ("w1", "w2", "w3")}
    assert stored == {
        "fp8_e8m0_32x32": {*attention, *shared, "engram.wkv", "main_proj"},
        "fp4_e8m0_32": {f"ffn.experts.{name}" for name in ("w1", "w2", "w3")},
        "fp8_e8m0_32": {"engram.embed"},
    }


def test_activations_stay_unrounded_before_a_plain_weight():
    x = jnp.full((1, 32), 1.01)
    np.testing.assert_array_equal(project(x, jnp.eye(32), activation="fp8_e8m0_32"), x)


def test_rms_norm():
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((5, 48)).astype(np.float32), rng.standard_normal(48).astype(np.float32)
    close(rms_norm(x, weight, 1e-20), np.stack([oracle.rms_norm(row, weight) for row in x]))
    narrow = rms_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight), 1e-20)
    assert narrow.dtype == jnp.bfloat16
    same_bits(rms_norm(jnp.zeros((1, 8)), None, 1e-20), np.zeros((1, 8)))


@pytest.mark.parametrize("block", [1, 3, 4, 7, 100])
def test_blocks_of_queries_change_nothing(block):
    x = jnp.arange(2 * 7 * 3).reshape(2, 7, 3)
    doubled, total = by_query_block(lambda a, none: (a * 2, a.sum(-1)), block, x, None)
    np.testing.assert_array_equal(doubled, x * 2)
    np.testing.assert_array_equal(total, x.sum(-1))
