"""Bits of the number formats: E2M1, E4M3 and E8M0, encoded and decoded by integer arithmetic.

No function here rounds by casting a float32 to a narrow type and back. XLA removes such a pair of casts on GPU, a cast
to E8M0 rounds to nearest and turns 0 into NaN, a cast to E4M3 does not saturate, and a cast to E2M1 loses NaN.
Codes and scales are uint8 everywhere; nibbles are packed with the even channel low.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255
E4M3_NAN = 0x7F


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """One block format: how a value, and the scale of its group, are stored."""

    element: str  # "e2m1" (two a byte) or "e4m3"
    scale: str  # "e8m0" (a power of two, rounded up) or "e4m3" (nearest)
    group: int  # channels that share a scale
    rows: int = 1  # rows that share it: 32 in dense weights
    floor: float  # amax of a group is raised to this, so that a zero group has a finite scale

    @property
    def largest(self) -> float:
        """The largest finite value of an element."""
        return E2M1_MAX if self.element == "e2m1" else E4M3_MAX

    @property
    def channels_per_byte(self) -> int:
        """Channels in one byte of codes: 2 or 1."""
        return 2 if self.element == "e2m1" else 1

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the uint8 codes of an array of `shape`."""
        return (*shape[:-1], shape[-1] // self.channels_per_byte)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the uint8 scales of an array of `shape`; edge blocks of 32x32 weights may be partial."""
        last = -(-shape[-1] // self.group)
        return (*shape[:-1], last) if self.rows == 1 else (*shape[:-2], -(-shape[-2] // self.rows), last)


FORMATS = {
    "fp8_e8m0_32": Format(element="e4m3", scale="e8m0", group=32, floor=1e-4),
    "fp4_e8m0_32": Format(element="e2m1", scale="e8m0", group=32, floor=6 * 2.0**-126),
    "fp4_e4m3_16": Format(element="e2m1", scale="e4m3", group=16, floor=6 * 2.0**-9),
    "fp8_e8m0_32x32": Format(element="e4m3", scale="e8m0", group=32, rows=32, floor=1e-4),
}


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


def encode_e2m1_scaled(x, scale):
    """Rounds x / scale to E2M1 codes as `encode_e2m1` does, without the division, which XLA may replace by an inverse.

    |x| is compared with `scale` times the midpoints between codes; with an E4M3 scale float32 holds these exactly, and
    no quotient rounds onto a midpoint that it does not equal.
    """
    size, code = jnp.abs(x), jnp.zeros(x.shape, jnp.uint8)
    for lower_code, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        border = scale * jnp.float32(midpoint)
        code += (size >= border if lower_code % 2 else size > border).astype(jnp.uint8)
    return code | ((_bits(x) >> 31) << 3).astype(jnp.uint8)


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

    XLA replaces a division by a constant with an inexact multiplication, so that is only a first guess: `amax` is then
    compared with `largest` times the midpoints on both sides of the guess, which float32 holds exactly.
    """
    guess = encode_e4m3(amax * jnp.float32(1 / largest))
    odd = guess & 1 == 1
    here = decode_e4m3(guess)
    above, below = decode_e4m3(guess + 1), decode_e4m3(jnp.maximum(guess, 1) - 1)  # above 448: NaN, no midpoint
    upper, lower = ((here + other) * jnp.float32(largest / 2) for other in (above, below))
    guess = jnp.where((amax > upper) | (odd & (amax == upper)), guess + 1, guess)
    guess = jnp.where((amax < lower) | (odd & (amax == lower)), guess - 1, guess)
    return jnp.where(jnp.isfinite(amax), guess, jnp.uint8(E4M3_NAN))


def pack_nibbles(codes):
    """Packs codes [..., n] of 4 bits into bytes [..., n / 2], the even channel in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed):
    """Unpacks bytes [..., n] into codes [..., 2 n] of 4 bits, the low nibble first."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return lax.reshape(pair, (*packed.shape[:-1], 2 * packed.shape[-1]))
