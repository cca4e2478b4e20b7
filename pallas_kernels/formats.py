"""Bits of the number formats: E2M1, E4M3 and E8M0, encoded and decoded by integer arithmetic.

No function here rounds by casting a float32 to a narrow type and back. XLA removes such a pair of casts on GPU, a cast
to E8M0 rounds to nearest and turns 0 into NaN, a cast to E4M3 does not saturate, and a cast to E2M1 loses NaN.
Codes and scales are uint8 everywhere; nibbles are packed with the even channel low.
"""

import jax
import jax.numpy as jnp
from jax import lax

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255
E4M3_NAN = 0x7F


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.uint32)


def _round_bits(bits, drop: int):
    """Shifts `drop` low bits out of a float's bits, rounding to nearest, ties to even; a carry moves the exponent."""
    half = jnp.uint32((1 << (drop - 1)) - 1)
    return (bits + half + ((bits >> drop) & jnp.uint32(1))) >> drop


def encode_e2m1(x):
    """Rounds f32 to E2M1 codes 0..15 (uint8): nearest, ties to the even code, clipped to +-6; -0 keeps its sign.

    NaN has no code here (it becomes 6): a caller keeps it visible in the scale of its group.
    """
    size = jnp.minimum(jnp.abs(x), jnp.float32(E2M1_MAX))
    below_one = jnp.round(size * 2).astype(jnp.uint32)  # 0, .5 and 1 are evenly spaced
    normal = _round_bits(_bits(size), 22) - jnp.uint32(2 * 126)
    code = jnp.where(size < 1, below_one, normal)
    code = jnp.where(jnp.isnan(x), jnp.uint32(7), code)
    return (code | ((_bits(x) >> 31) << 3)).astype(jnp.uint8)


def decode_e2m1(code):
    """Decodes E2M1 codes 0..15 to f32, exactly; code 8 is -0."""
    code = code.astype(jnp.uint32)
    size = code & 7
    bits = jnp.where(size < 2, size * jnp.uint32(0x3F000000), ((size >> 1) + 126) << 23 | (size & 1) << 22)
    return lax.bitcast_convert_type(bits | (code >> 3) << 31, jnp.float32)


def encode_e4m3(x):
    """Rounds f32 to E4M3 codes (uint8): nearest, ties to even, clipped to +-448; NaN becomes NaN (0x7F)."""
    size = jnp.minimum(jnp.abs(x), jnp.float32(E4M3_MAX))
    subnormal = jnp.round(size * 512).astype(jnp.uint32)  # steps of 2^-9
    normal = _round_bits(_bits(size), 20) - jnp.uint32(120 << 3)
    code = jnp.where(size < 2.0**-6, subnormal, normal)
    code = jnp.where(jnp.isnan(x), jnp.uint32(E4M3_NAN), code)
    return (code | ((_bits(x) >> 31) << 7)).astype(jnp.uint8)


def decode_e4m3(code):
    """Decodes E4M3 codes (uint8) to f32, exactly; 0x7F and 0xFF are NaN."""
    return lax.bitcast_convert_type(code, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e8m0_ceil(amax, largest: float):
    """Encodes the least power of two `s` with `amax <= largest * s`, as an E8M0 byte (uint8).

    This is 2^ceil(log2(amax / largest)) without the division, which XLA would replace by an inexact multiplication:
    amax's mantissa is compared with that of `largest`. `amax` must be at least largest * 2^-126; inf and NaN give 255.
    """
    bits, top = _bits(amax), _bits(jnp.float32(largest))
    mantissa = jnp.uint32(0x7FFFFF)
    exponent = (bits >> 23) + ((bits & mantissa) > (top & mantissa)).astype(jnp.uint32) + 127 - (top >> 23)
    return jnp.where(jnp.isfinite(amax), exponent, jnp.uint32(E8M0_NAN)).astype(jnp.uint8)


def decode_e8m0(byte):
    """Decodes E8M0 bytes (uint8) to f32: 2^(byte - 127), and 255 to NaN.

    A machine that flushes subnormals reads byte 0 as 0.
    """
    byte = byte.astype(jnp.uint32)
    bits = jnp.where(byte == 0, jnp.uint32(1 << 22), byte << 23)
    return lax.bitcast_convert_type(jnp.where(byte == E8M0_NAN, jnp.uint32(0x7FC00000), bits), jnp.float32)


def encode_e4m3_scale(amax, largest: float):
    """Encodes amax / largest rounded to E4M3 (uint8), clipped to 448; inf and NaN give NaN.

    The divisor hides behind a barrier: XLA turns division by a constant into multiplication by its rounded inverse.
    """
    scale = amax / lax.optimization_barrier(jnp.float32(largest))
    return encode_e4m3(jnp.where(jnp.isfinite(amax), scale, jnp.nan))


def pack_nibbles(codes):
    """Packs codes [..., n] of 4 bits into bytes [..., n / 2], the even channel in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed):
    """Unpacks bytes [..., n] into codes [..., 2 n] of 4 bits, the low nibble first."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return jax.lax.reshape(pair, (*packed.shape[:-1], 2 * packed.shape[-1]))
