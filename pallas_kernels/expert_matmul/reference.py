"""Take each tile's expert, dequantise, multiply: as many tiles at a time as bounds what is dequantised."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import fitting
from pallas_kernels.products import contract
from pallas_kernels.quantize.reference import dequantize


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format):
    """See the contract."""
    if expert_M is None:
        expert_M = jnp.arange(x_MRD.shape[0], dtype=jnp.int32)

    def multiply(x, expert):
        planes = (lax.dynamic_index_in_dim(a, jnp.maximum(expert, 0), keepdims=False) for a in (codes_EFD, scales_EFG))
        weight = next(planes) if format is None else dequantize(*planes, format=format, dtype=x.dtype)
        if weight.dtype != x.dtype:
            x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
        return jnp.where(expert < 0, 0, contract("rd,fd->rf", x, weight))

    tiles, at_once = expert_M.size, fitting(4 * codes_EFD.shape[1] * x_MRD.shape[2])
    if tiles <= at_once:
        return jax.vmap(multiply)(x_MRD, expert_M)
    extra = -tiles % at_once
    x_MRD = jnp.pad(x_MRD, ((0, extra), (0, 0), (0, 0))).reshape(-1, at_once, *x_MRD.shape[1:])
    expert_M = jnp.pad(expert_M, (0, extra), constant_values=-1).reshape(-1, at_once)
    y = lax.map(lambda batch: jax.vmap(multiply)(*batch), (x_MRD, expert_M))
    return y.reshape(-1, *y.shape[2:])[:tiles]
