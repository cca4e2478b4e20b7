"""Block formats: FP4 and FP8 values that share a scale per group (architecture section 4).

A quantised array is a `Packed`: one plane of codes and one of scales, both uint8, so that what the docs call packed is
packed. The formats stand in `pallas_kernels.formats`, the arithmetic in `pallas_kernels.quantize`; this file adds the
container and the gradient.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from pallas_kernels import quantize as kernels
from pallas_kernels.formats import FORMATS
from pallas_kernels.quantize import reference


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
    return rotate_quantize(x, None, format)


def rotate_quantize(x, rotation, format: str | None) -> Packed:
    """Rotates adjacent channel pairs by `rotation`, (cos, sin) from `rope.turn`, then quantises; see `quantize`."""
    if format is None:
        x = x if rotation is None else reference.rotate(x, *rotation)
        return Packed(x.astype(jnp.float32), jnp.zeros((*x.shape[:-1], 0), jnp.uint8), None)
    return Packed(*kernels.quantize(x, rotation, format=format), format)


def dequantize(packed: Packed, dtype):
    """Decodes to [..., n] of `dtype`; exact in float32, and in bfloat16 because no value has more than 7 bits."""
    if packed.format is None:
        return packed.codes.astype(dtype)
    return kernels.dequantize(packed.codes, packed.scales, format=packed.format, dtype=dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _round_trip(x, format: str):
    codes, scales = reference.quantize(x, format=format)  # not the kernels: XLA fuses this into what is around it
    return reference.dequantize(codes, scales, format=format, dtype=x.dtype)


@_round_trip.defjvp
def _straight_through(format, primals, tangents):
    return _round_trip(primals[0], format), tangents[0]


def fake_quantize(x, format: str | None):
    """Rounds x to what `format` can hold, in x's dtype; None returns x.

    The gradient is straight through, 1 everywhere: scales follow the data, so nothing is ever clipped (training.md).
    """
    return x if format is None else _round_trip(x, format)
