"""One tile after another: take the expert's planes, dequantise, multiply. TILES_AT_ONCE bounds what is dequantised."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantize.reference import dequantize

TILES_AT_ONCE = 8


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format: str):
    """See the contract."""

    def multiply(work):
        x, expert = work
        planes = (lax.dynamic_index_in_dim(a, jnp.maximum(expert, 0), keepdims=False) for a in (codes_EFD, scales_EFG))
        weight = dequantize(*planes, format=format, dtype=x.dtype)
        y = jnp.einsum("rd,fd->rf", x, weight, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
        return jnp.where(expert < 0, 0, y)

    return lax.map(multiply, (x_MRD, expert_M), batch_size=TILES_AT_ONCE)
