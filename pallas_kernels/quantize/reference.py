"""Quantise and dequantise in plain JAX: the amax of every group, its scale, the codes."""

import jax.numpy as jnp

from pallas_kernels import formats as bits
from pallas_kernels.formats import FORMATS, Format


def quantize(x, rotation=None, *, format: str):
    """See the contract."""
    f = FORMATS[format]
    if rotation is not None:
        x = rotate(x, *rotation)
    x = x.astype(jnp.float32)
    # A maximum drops NaN on CPU; inf gives the same scale.
    amax = jnp.maximum(_amax(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), f), jnp.float32(f.floor))
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
    return bits.pack_nibbles(codes) if f.element == "e2m1" else codes, scales


def dequantize(codes, scales, *, format: str, dtype):
    """See the contract."""
    f = FORMATS[format]
    values = bits.decode_e2m1(bits.unpack_nibbles(codes)) if f.element == "e2m1" else bits.decode_e4m3(codes)
    return (values * _spread(_decode_scale(scales, f), values.shape, f)).astype(dtype)


def rotate(x, cos, sin):
    """Rotates adjacent pairs of the last R channels in float32; returns x's dtype. cos, sin: f32 [..., R / 2]."""
    rotated = 2 * cos.shape[-1]
    still, tail = x[..., :-rotated], x[..., -rotated:].astype(jnp.float32)
    even, odd = tail[..., 0::2], tail[..., 1::2]
    pairs = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([still, pairs.reshape(tail.shape).astype(x.dtype)], axis=-1)


def _amax(size, f: Format):
    if f.rows == 1:
        return size.reshape(*size.shape[:-1], size.shape[-1] // f.group, f.group).max(-1)
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
