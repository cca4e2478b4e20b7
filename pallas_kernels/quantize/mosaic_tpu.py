"""Quantise and dequantise on TPU, with the channels turned onto sublanes.

A block of rows is transposed first, so that a group of 16 or 32 channels is two or four registers of 8 channels x 128
rows: its amax is a few maxima of whole registers, a scale is spread by a broadcast, and the even and odd channels,
which share a byte of E2M1 codes and turn together in the rotation, come apart by loads of every second sublane. The
scales are written as they are made, rows along lanes, which is also how XLA stores planes of less than 128 bytes a row
(so are codes of 64 bytes a row); wider codes are transposed back. Dequantising runs the same way backwards.

Bytes: x once, codes and scales once. Work: a transpose in and a quarter of one out, about 40 operations a value.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats as bits
from pallas_kernels.formats import FORMATS, Format

LANES = 128
FIRST = np.int32(0)  # a Python 0 in an index map would be 64 bits wide where x64 is on
TUNING = {"rows": 1024}  # rows in one grid step, if there are so many; a multiple of LANES
LEAST_ROWS = 256  # of an array: below, the code that XLA fuses is as good


def quantize(x, rotation=None, *, format: str):
    """See the contract."""
    f = _served(format, x.shape)
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"x of {x.dtype}; bfloat16 and float32 are served")
    x_BSN = _sequences(x)
    B, S, N = x_BSN.shape
    inputs, specs = [x_BSN], [_rows_first(S, N)]
    if rotation is not None:
        R = 2 * rotation[0].shape[-1]
        if R % 16 or rotation[0].dtype != jnp.float32:
            raise NotImplementedError(f"rotation of {R} channels in {rotation[0].dtype}; 16 at a time in float32")
        shape = (*x.shape[:-1], R // 2)
        inputs += [jnp.swapaxes(_sequences(jnp.broadcast_to(a, shape)), 1, 2) for a in rotation]
        specs += [_rows_last(S, R // 2)] * 2
    width, groups = N // f.channels_per_byte, N // f.group
    codes, scales = pl.pallas_call(
        functools.partial(_quantize, f=f),
        out_shape=(_plane(B, S, width), jax.ShapeDtypeStruct((B, groups, S), jnp.uint8)),
        grid=(B, pl.cdiv(S, _step_rows(S))),
        in_specs=specs,
        out_specs=(_rows_first(S, width) if width >= LANES else _rows_last(S, width), _rows_last(S, groups)),
        scratch_shapes=[pltpu.VMEM((N, LANES), jnp.float32), pltpu.VMEM((groups, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="quantize",
    )(*inputs)
    codes = codes if width >= LANES else jnp.swapaxes(codes, 1, 2)
    scales = jnp.swapaxes(scales, 1, 2)
    return codes.reshape(f.code_shape(x.shape)), scales.reshape(f.scale_shape(x.shape))


def dequantize(codes, scales, *, format: str, dtype):
    """See the contract."""
    f = FORMATS[format]
    shape = (*codes.shape[:-1], codes.shape[-1] * f.channels_per_byte)
    _served(format, shape)
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"values of {jnp.dtype(dtype)}; bfloat16 and float32 are served")
    codes_BSN, scales_BGS = _sequences(codes), jnp.swapaxes(_sequences(scales), 1, 2)
    B, S, width = codes_BSN.shape
    if width < LANES:
        codes_BSN = jnp.swapaxes(codes_BSN, 1, 2)
    return pl.pallas_call(
        functools.partial(_dequantize, f=f),
        out_shape=jax.ShapeDtypeStruct((B, S, shape[-1]), dtype),
        grid=(B, pl.cdiv(S, _step_rows(S))),
        in_specs=[
            _rows_first(S, width) if width >= LANES else _rows_last(S, width),
            _rows_last(S, scales_BGS.shape[1]),
        ],
        out_specs=_rows_first(S, shape[-1]),
        scratch_shapes=[pltpu.VMEM((shape[-1], LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        name="dequantize",
    )(codes_BSN, scales_BGS).reshape(shape)


def _served(format: str, shape) -> Format:
    """The format, if arrays of this shape are served."""
    f = FORMATS[format]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if f.rows > 1:
        raise NotImplementedError(f"format {format}: groups of {f.rows} rows")
    if shape[-1] % LANES:
        raise NotImplementedError(f"{shape[-1]} channels; they are served by {LANES}")
    if rows < LEAST_ROWS:
        raise NotImplementedError(f"{rows} rows; below {LEAST_ROWS} the code that XLA fuses is as good")
    return f


def _sequences(x):
    """[B, S, n]: the rows of the second last axis stay together if they fill a block, else all rows are one axis."""
    *_, rows, n = x.shape
    return x.reshape(-1, rows, n) if rows >= LEAST_ROWS else x.reshape(1, -1, n)


def _plane(B: int, S: int, width: int):
    """Codes: the rows along lanes where XLA stores them so."""
    return jax.ShapeDtypeStruct((B, S, width) if width >= LANES else (B, width, S), jnp.uint8)


def _step_rows(S: int) -> int:
    """Rows of one grid step."""
    return min(TUNING["rows"], -(-S // LANES) * LANES)


def _rows_first(S: int, width: int):
    return pl.BlockSpec((1, _step_rows(S), width), lambda b, s: (b, s, FIRST))


def _rows_last(S: int, width: int):
    return pl.BlockSpec((1, width, _step_rows(S)), lambda b, s: (b, FIRST, s))


def _by_lanes(block, rows: int):
    """Runs block(slice) for every LANES rows of a grid step."""

    def step(i, _):
        block(pl.ds(pl.multiple_of(i * LANES, LANES), LANES))

    lax.fori_loop(jnp.int32(0), jnp.int32(rows // LANES), step, None)


def _quantize(x_ref, *refs, f: Format):
    """One block of rows: x [T, N] -> codes and scales."""
    *angle_refs, codes_ref, scales_ref, turned_ref, amax_ref = refs

    def block(rows):
        turned_ref[...] = x_ref[0, rows, :].astype(jnp.float32).T
        even, odd = (turned_ref[half, :] for half in _halves(turned_ref))
        if angle_refs:
            cos, sin = (ref[0, :, rows] for ref in angle_refs)
            even, odd = _rotate(even, odd, cos, sin, x_ref.dtype)
        size = jnp.maximum(_size(even), _size(odd))
        amax_ref[...] = jnp.max(size.reshape(amax_ref.shape[0], f.group // 2, LANES), axis=1)
        # Through memory, so that 8 groups share a register; as the maximum leaves them, each fills one.
        amax = jnp.maximum(amax_ref[...], jnp.float32(f.floor))
        scales = bits.encode_e8m0_ceil(amax, f.largest).astype(jnp.int32) if f.scale == "e8m0" else _e4m3_scale(amax)
        scales_ref[0, :, rows] = scales.astype(jnp.uint8)
        codes = [_encode(values, scales, f) for values in (even, odd)]
        if f.element == "e2m1":
            codes = codes[0] | codes[1] << 4
        else:
            for half, part in zip(_halves(turned_ref), codes, strict=True):
                turned_ref[half, :] = part.astype(jnp.float32)
            codes = turned_ref[...].astype(jnp.int32)
        if codes.shape[0] >= LANES:
            codes_ref[0, rows, :] = codes.T.astype(jnp.uint8)
        else:
            codes_ref[0, :, rows] = codes.astype(jnp.uint8)

    _by_lanes(block, x_ref.shape[1])


def _size(x):
    """|x|, with inf for NaN, which a maximum may drop; both give a NaN scale."""
    return jnp.where(jnp.isnan(x), jnp.float32(jnp.inf), jnp.abs(x))


def _halves(turned_ref):
    """The slices of the even and of the odd channels."""
    return tuple(pl.ds(parity, turned_ref.shape[0] // 2, stride=2) for parity in (0, 1))


def _rotate(even, odd, cos, sin, dtype):
    """Rotates the last pairs of channels and rounds them to `dtype`."""
    still = even.shape[0] - cos.shape[0]
    a, b = even[still:], odd[still:]
    turned = (part.astype(dtype).astype(jnp.float32) for part in (a * cos - b * sin, a * sin + b * cos))
    return tuple(jnp.concatenate([x[:still], part], axis=0) for x, part in zip((even, odd), turned, strict=True))


def _e4m3_scale(amax):
    """`formats.encode_e4m3_scale` in i32, because bytes have no arithmetic here."""
    guess = bits.encode_e4m3(amax * jnp.float32(1 / bits.E2M1_MAX)).astype(jnp.int32)
    here, above, below = (_decode_e4m3(code) for code in (guess, guess + 1, jnp.maximum(guess, 1) - 1))
    upper, lower = ((here + other) * jnp.float32(bits.E2M1_MAX / 2) for other in (above, below))
    odd = (guess & 1) == 1
    guess = jnp.where((amax > upper) | (odd & (amax == upper)), guess + 1, guess)
    guess = jnp.where((amax < lower) | (odd & (amax == lower)), guess - 1, guess)
    return jnp.where(jnp.isfinite(amax), guess, bits.E4M3_NAN)


def _decode_e4m3(code):
    return bits.decode_e4m3(code.astype(jnp.uint8))


def _encode(values, scales, f: Format):
    """Rounds values [n, T] to codes (i32), given the scale bytes (i32) [groups, T]."""
    if f.scale == "e4m3":
        return _encode_e2m1_scaled(values, _decode_e4m3(scales))
    # The inverse of a power of two is exact, and so is the product; 1 <= byte <= 253, or NaN.
    inverse = lax.bitcast_convert_type((254 - scales) << 23, jnp.float32)
    inverse = jnp.where(scales == bits.E8M0_NAN, jnp.float32(jnp.nan), inverse)
    scaled = values * _spread(inverse, values.shape[0])
    return (bits.encode_e2m1(scaled) if f.element == "e2m1" else bits.encode_e4m3(scaled)).astype(jnp.int32)


def _encode_e2m1_scaled(values, scales):
    """`formats.encode_e2m1_scaled` in i32."""
    size, scale = jnp.abs(values), _spread(scales, values.shape[0])
    code = jnp.zeros(values.shape, jnp.int32)
    for lower_code, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        border = scale * jnp.float32(midpoint)
        code = jnp.where(size >= border if lower_code % 2 else size > border, lower_code + 1, code)
    return code | lax.shift_right_logical(lax.bitcast_convert_type(values, jnp.int32), jnp.int32(31)) << 3


def _dequantize(codes_ref, scales_ref, out_ref, turned_ref, *, f: Format):
    """One block of rows: codes and scales -> values [T, N]."""

    def block(rows):
        if turned_ref.shape[0] // f.channels_per_byte >= LANES:
            codes = codes_ref[0, rows, :].astype(jnp.int32).T
        else:
            codes = codes_ref[0, :, rows].astype(jnp.int32)
        scales = scales_ref[0, :, rows].astype(jnp.int32)
        scales = bits.decode_e8m0(scales) if f.scale == "e8m0" else _decode_e4m3(scales)
        scales = _spread(scales, codes.shape[0])
        if f.element == "e2m1":
            for half, nibble in zip(_halves(turned_ref), (codes & 15, codes >> 4), strict=True):
                turned_ref[half, :] = bits.decode_e2m1(nibble) * scales
        else:
            turned_ref[...] = _decode_e4m3(codes) * scales
        out_ref[0, rows, :] = turned_ref[...].T.astype(out_ref.dtype)

    _by_lanes(block, out_ref.shape[1])


def _spread(scales, n: int):
    """Repeats the scale [groups, T] of each group over its n / groups rows."""
    groups, rows = scales.shape
    return jnp.broadcast_to(scales[:, None], (groups, n // groups, rows)).reshape(n, rows)
