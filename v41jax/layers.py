"""What every part shares: projections over stored weights, and RMSNorm."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.products import contract
from v41jax import quant
from v41jax.quant import FORMATS, Packed


def project(x, weight, *, activation: str | None = None, dtype=None):
    """Multiplies by a stored weight: x @ weight^T, accumulated in float32.

    Args:
      x: float [..., in].
      weight: [out, in] of x's dtype or float32, or Packed, dequantised here and nowhere kept.
      activation: format that rounds x before it enters a Packed weight (W8A8, W4A8); None leaves x alone.
      dtype: of the result; None: x's.
    Returns:
      [..., out].
    Source: architecture sections 4 and 10; reference `linear`.
    """
    dtype = dtype or x.dtype
    if not isinstance(weight, Packed):
        if weight.dtype != x.dtype:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        y = contract("ti,oi->to", x.reshape(-1, x.shape[-1]), weight)
        return y.reshape(*x.shape[:-1], y.shape[-1]).astype(dtype)
    rows = quant.fake_quantize(x, activation).reshape(1, -1, x.shape[-1])
    one = jax.tree.map(lambda plane: plane[None], weight)
    y = tile_project(rows, one, None)
    return y.reshape(*x.shape[:-1], y.shape[-1]).astype(dtype)


def group_project(x_RGD, weight):
    """Multiplies each of G groups of channels by its own rows of a stored weight [G * F, D]: f32 [R, G, F]."""
    groups = x_RGD.shape[1]
    # A block of scales must not straddle two groups; it does only where groups are narrower than a block.
    if not isinstance(weight, Packed) or weight.codes.shape[0] % (groups * FORMATS[weight.format].rows):
        plain = quant.dequantize(weight, x_RGD.dtype) if isinstance(weight, Packed) else weight
        weight = Packed(plain, jnp.zeros((groups, 0), jnp.uint8), None)
    experts = jax.tree.map(lambda p: p.reshape(groups, p.shape[0] // groups, p.shape[1]), weight)
    y = tile_project(jnp.swapaxes(x_RGD, 0, 1), experts, None)
    return jnp.swapaxes(y, 0, 1)


def tile_project(x_MRD, weights: Packed, expert_M):
    """Multiplies tiles of rows by one weight each, of those stacked in `weights` [E, F, D]: f32 [M, R, F].

    None for `expert_M` gives each tile its own.
    """
    return expert_matmul(x_MRD, weights.codes, weights.scales, expert_M, format=weights.format)


def rms_norm(x, weight, eps: float):
    """Divides by the root mean square of the last axis, times `weight` (None: 1): float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + jnp.float32(eps))
    return (y if weight is None else y * weight.astype(jnp.float32)).astype(x.dtype)
