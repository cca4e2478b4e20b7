"""The iterations as a scan, which the CPU compiler takes in half the time of the same steps unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def sinkhorn(product_RP, scale, base_M, *, streams: int, iterations: int, eps: float, width: int, norm_eps: float):
    """See the contract."""
    Z = streams
    inverse_R1 = lax.rsqrt(product_RP[:, -1:] / width + norm_eps)
    kinds_M = jnp.repeat(scale, np.array([Z, Z, Z * Z]), total_repeat_length=(2 + Z) * Z)
    logits_RM = product_RP[:, :-1] * inverse_R1 * kinds_M + base_M
    pre = jax.nn.sigmoid(logits_RM[:, :Z]) + eps
    post = 2 * jax.nn.sigmoid(logits_RM[:, Z : 2 * Z])
    comb = jax.nn.softmax(logits_RM[:, 2 * Z :].reshape(-1, Z, Z), axis=-1) + eps
    comb = comb / (comb.sum(-2, keepdims=True) + eps)

    def iterate(comb, _):
        comb = comb / (comb.sum(-1, keepdims=True) + eps)
        return comb / (comb.sum(-2, keepdims=True) + eps), None

    comb, _ = lax.scan(iterate, comb, length=iterations - 1)
    return jnp.concatenate([pre, post, comb.reshape(-1, Z * Z)], axis=-1)
