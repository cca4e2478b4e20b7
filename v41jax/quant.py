"""Block formats: FP4 and FP8 values that share a scale per group (architecture section 4).

A quantised array is a `Packed`: one plane of codes and one of scales, both uint8, so that what the docs call packed is
packed. The bits are made and read in `pallas_kernels.formats`; this file knows groups, scales and gradients.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from pallas_kernels import formats as bits


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
        return bits.E2M1_MAX if self.element == "e2m1" else bits.E4M3_MAX

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A quantised array of logical shape [..., n], or with `format` None a plain one in the same clothes.

    codes: uint8 [..., n] (E4M3) or [..., n / 2] (E2M1, even channel in the low nibble); None: float32 [..., n].
    scales: uint8, one per group of channels (and block of rows); None: [..., 0].
    """

    codes: jax.Array
    scales: jax.Array
    format: str | None = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes in memory of both planes."""
        return sum(plane.size * plane.dtype.itemsize for plane in (self.codes, self.scales))


def abstract(shape: tuple[int, ...], format: str | None) -> Packed:
    """Describes the Packed of an array of `shape` as ShapeDtypeStructs."""
    f = FORMATS[format] if format is not None else None
    codes, scales = (f.code_shape(shape), f.scale_shape(shape)) if f else (shape, (*shape[:-1], 0))
    codes = jax.ShapeDtypeStruct(codes, jnp.uint8 if f else jnp.float32)
    scales = jax.ShapeDtypeStruct(scales, jnp.uint8)
    return Packed(cast(jax.Array, codes), cast(jax.Array, scales), format)


def quantize(x, format: str | None) -> Packed:
    """Quantises an array in blocks.

    Args:
      x: float [..., n], rounded as float32; n a multiple of the group, except in 32x32 formats.
      format: a key of FORMATS, or None to keep float32.
    Returns:
      The codes, nearest with ties to even, and scales of x. A group of zeros gets a finite scale and decodes to zeros;
      a group that holds NaN or inf gets a NaN scale, so all of it decodes to NaN.
    Source: architecture section 4; reference `act_quant`, `fp4_act_quant`.
    """
    x = x.astype(jnp.float32)
    if format is None:
        return Packed(x, jnp.zeros((*x.shape[:-1], 0), jnp.uint8), None)
    f = FORMATS[format]
    if f.rows == 1 and x.shape[-1] % f.group:
        raise ValueError(f"{x.shape[-1]} channels are not whole groups of {f.group} ({format})")
    amax = jnp.maximum(_amax(jnp.abs(x), f), jnp.float32(f.floor))
    if f.scale == "e8m0":
        scales = bits.encode_e8m0_ceil(amax, f.largest)
    else:
        scales = bits.encode_e4m3_scale(amax, f.largest)
    spread = _spread(_decode_scale(scales, f), x.shape, f)
    if f.scale == "e4m3":
        codes = bits.encode_e2m1_scaled(x, spread)
    elif f.element == "e2m1":
        codes = bits.encode_e2m1(x / spread)  # by a power of two: exact
    else:
        codes = bits.encode_e4m3(x / spread)
    return Packed(bits.pack_nibbles(codes) if f.element == "e2m1" else codes, scales, format)


def dequantize(packed: Packed, dtype):
    """Decodes to [..., n] of `dtype`; exact in float32, and in bfloat16 because no value has more than 7 bits."""
    if packed.format is None:
        return packed.codes.astype(dtype)
    f = FORMATS[packed.format]
    e2m1 = f.element == "e2m1"
    values = bits.decode_e2m1(bits.unpack_nibbles(packed.codes)) if e2m1 else bits.decode_e4m3(packed.codes)
    return (values * _spread(_decode_scale(packed.scales, f), values.shape, f)).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_trip(x, format: str):
    return dequantize(quantize(x, format), x.dtype)


@_round_trip.defjvp
def _straight_through(format, primals, tangents):
    return _round_trip(primals[0], format), tangents[0]


def fake_quantize(x, format: str | None):
    """Rounds x to what `format` can hold, in x's dtype; None returns x.

    The gradient is straight through, 1 everywhere: scales follow the data, so nothing is ever clipped (training.md).
    """
    return x if format is None else _round_trip(x, format)


def _amax(size, f: Format):
    if f.rows == 1:
        return size.reshape(*size.shape[:-1], -1, f.group).max(-1)
    *_, out, width = size.shape
    edges = [(0, 0)] * (size.ndim - 2) + [(0, -out % f.rows), (0, -width % f.group)]
    size = jnp.pad(size, edges)
    blocks = size.reshape(*size.shape[:-2], size.shape[-2] // f.rows, f.rows, -1, f.group)
    return blocks.max((-3, -1))


def _spread(scales, shape, f: Format):
    """Repeats each group's scale over its values: [..., n]."""
    scales = jnp.repeat(scales, f.group, axis=-1)[..., : shape[-1]]
    return scales if f.rows == 1 else jnp.repeat(scales, f.rows, axis=-2)[..., : shape[-2], :]


def _decode_scale(scales, f: Format):
    return bits.decode_e8m0(scales) if f.scale == "e8m0" else bits.decode_e4m3(scales)
