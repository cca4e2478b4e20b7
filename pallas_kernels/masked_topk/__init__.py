"""Exact top-k of a masked row."""

import jax.numpy as jnp

from pallas_kernels import debug, dispatch
from pallas_kernels.block_max import reference as block_max
from pallas_kernels.masked_topk import mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "reference": reference.masked_topk,
    "mosaic_gpu": mosaic_gpu.masked_topk,
    "mosaic_tpu": mosaic_tpu.masked_topk,
}


def masked_topk(scores, length=None, *, k: int, implementation: str | None = None):
    """Chooses the k best positions of the last axis; greater first, and on ties the lower position.

    Args:
      scores: f32 [..., S]; -inf and NaN are never chosen; +inf may be. -0 and +0 tie.
      length: i32 [...], positions at or past it are never chosen, whatever they hold; None: all S count.
      k: positions wanted, 1 or more; it may exceed S.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      i32 [..., k] ascending positions, then -1 where fewer than k can be chosen. Exact: a set and an order that no
      backend, batch or sharding changes.
    """
    if k < 1:
        raise ValueError(f"k={k}; a top-k takes 1 position or more")
    *rows, width = scores.shape
    if width == 0:
        return jnp.full((*rows, k), -1, jnp.int32)
    if length is None:
        length = jnp.full(rows, width, jnp.int32)
    flat = scores.reshape(-1, width), length.reshape(-1)
    debug.report_nans("masked_topk", block_max.count_nans, *flat)
    return dispatch.run("masked_topk", BACKENDS, implementation, *flat, k=k).reshape(*rows, k)
