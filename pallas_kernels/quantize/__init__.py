"""Rotate, quantise in blocks and pack; and dequantise (architecture section 4)."""

from pallas_kernels import dispatch
from pallas_kernels.formats import FORMATS
from pallas_kernels.quantize import mosaic_gpu, mosaic_tpu, reference

QUANTIZE = {
    "reference": reference.quantize,
    "mosaic_gpu": mosaic_gpu.quantize,
    "mosaic_tpu": mosaic_tpu.quantize,
}
DEQUANTIZE = {
    "reference": reference.dequantize,
    "mosaic_gpu": mosaic_gpu.dequantize,
    "mosaic_tpu": mosaic_tpu.dequantize,
}


def quantize(x, rotation=None, *, format: str, implementation: str | None = None):
    """Rotates the last channels and quantises in blocks.

    Args:
      x: float [..., n], n a multiple of the group, except in formats whose blocks have rows, [..., rows, n].
      rotation: (cos, sin), f32 [..., R / 2] each, of the angles by which adjacent pairs of the last R channels turn
        first; the rotated values are rounded to x's dtype. None: no rotation.
      format: a key of FORMATS.
      implementation: a key of QUANTIZE that must run or raise; None picks by platform.
    Returns:
      uint8 codes and scales, shaped by `Format.code_shape` and `scale_shape`. Nearest, ties to even. A group of zeros
      gets a finite scale and decodes to zeros; a group with NaN or inf a NaN scale. Without a rotation every backend
      agrees to the bit; with one, they may round its two products differently, and a code by one step.
    """
    f = FORMATS[format]
    if f.rows == 1 and x.shape[-1] % f.group:
        raise ValueError(f"{x.shape[-1]} channels are not whole groups of {f.group} ({format})")
    return dispatch.run("quantize", QUANTIZE, implementation, x, rotation, format=format)


def dequantize(codes, scales, *, format: str, dtype, implementation: str | None = None):
    """Decodes to [..., n] of `dtype`; exact in float32, and in bfloat16 because no value has more than 7 bits."""
    return dispatch.run("dequantize", DEQUANTIZE, implementation, codes, scales, format=format, dtype=dtype)
