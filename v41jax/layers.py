"""What every part shares: projections over stored weights, RMSNorm, and work in blocks of queries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from v41jax import quant
from v41jax.quant import Packed

HIGHEST = lax.Precision.HIGHEST  # else GPUs round float32 operands to TF32 and TPUs to bfloat16


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
    if isinstance(weight, Packed):
        x = quant.fake_quantize(x, activation)
        weight = quant.dequantize(weight, x.dtype)
    if weight.dtype != x.dtype:
        x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return einsum("...i,oi->...o", x, weight, dtype=dtype)


def einsum(subscripts: str, *operands, dtype):
    """Contracts in the operands' own precision, accumulates in float32, and rounds once to `dtype`."""
    out = jnp.einsum(subscripts, *operands, precision=HIGHEST, preferred_element_type=jnp.float32)
    return out.astype(dtype)


def rms_norm(x, weight, eps: float):
    """Divides by the root mean square of the last axis, times `weight` (None: 1): float32 inside, x's dtype out."""
    x32 = x.astype(jnp.float32)
    y = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + jnp.float32(eps))
    return (y if weight is None else y * weight.astype(jnp.float32)).astype(x.dtype)


def by_query_block(fn: Callable, block: int, *arrays_BT):
    """Runs `fn` on blocks of query tokens one after another, so that what it makes inside is [B, block, ...].

    `fn` takes and returns trees of arrays whose second axis is the query; queries must not depend on each other.
    The last block is padded with copies of the last query, whose results are dropped.
    """
    tokens = jax.tree.leaves(arrays_BT)[0].shape[1]
    if tokens <= block:
        return fn(*arrays_BT)
    blocks = -(-tokens // block)

    def split(a):
        a = jnp.pad(a, [(0, 0), (0, blocks * block - tokens)] + [(0, 0)] * (a.ndim - 2), mode="edge")
        return jnp.moveaxis(a.reshape(a.shape[0], blocks, block, *a.shape[2:]), 1, 0)

    def join(a):
        a = jnp.moveaxis(a, 0, 1)
        return a.reshape(a.shape[0], blocks * block, *a.shape[3:])[:, :tokens]

    return jax.tree.map(join, lax.map(lambda xs: fn(*xs), jax.tree.map(split, arrays_BT)))
