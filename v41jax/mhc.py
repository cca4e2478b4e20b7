"""Single-pass manifold-constrained hyper-connections: Z parallel residual streams (architecture section 2).

A sublayer's mixes come from the streams that enter it; its `pre` collapses the streams for the NEXT sublayer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sinkhorn import sinkhorn
from v41jax.config import Config
from v41jax.layers import project, rms_norm
from v41jax.tree import ArraySpec, Specs


class Mixes(NamedTuple):
    """f32 weights: pre [B, T, Z] collapses, post [B, T, Z] adds the output, comb [B, T, Z, Z] mixes streams."""

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def specs(cfg: Config, sublayer: str) -> Specs:
    """Describes the mixing weights of "attn" or "ffn"; all float32."""
    Z = cfg.hc_mult
    mixes = (2 + Z) * Z

    def f32(shape, axes, init="normal"):
        return ArraySpec(shape=shape, axes=axes, init=init, dtype="float32", suffix="")

    return {
        f"hc_{sublayer}_fn": f32((mixes, Z * cfg.hidden_size), (None, "embed")),
        f"hc_{sublayer}_base": f32((mixes,), (None,), "zeros"),
        f"hc_{sublayer}_scale": f32((3,), (None,), "ones"),
    }


def mixes(params, sublayer: str, streams_BTZD, *, cfg: Config) -> Mixes:
    """Computes a sublayer's mixes from the streams that enter it, in float32 throughout."""
    flat = streams_BTZD.reshape(*streams_BTZD.shape[:2], -1).astype(jnp.float32)
    logits = project(rms_norm(flat, None, cfg.rms_norm_eps), params[f"hc_{sublayer}_fn"])
    scale, base = params[f"hc_{sublayer}_scale"], params[f"hc_{sublayer}_base"]
    return split_mixes(logits, scale, base, streams=cfg.hc_mult, iterations=cfg.hc_sinkhorn_iters, eps=cfg.hc_eps)


def split_mixes(logits, scale, base, *, streams: int, iterations: int, eps: float) -> Mixes:
    """Turns mixing logits f32 [..., (2 + Z) Z] into Mixes; `comb` by Sinkhorn iterations, short of convergence.

    Source: reference `hc_split_sinkhorn`.
    """
    Z, lead = streams, logits.shape[:-1]
    logits = logits * jnp.repeat(scale, np.array([Z, Z, Z * Z]), total_repeat_length=(2 + Z) * Z) + base
    rows = logits.reshape(-1, logits.shape[-1])
    flat = sinkhorn(rows, streams=Z, iterations=iterations, eps=eps).reshape(logits.shape)
    return Mixes(flat[..., :Z], flat[..., Z : 2 * Z], flat[..., 2 * Z :].reshape(*lead, Z, Z))


def collapse(pre_BTZ, streams_BTZD):
    """Sums the streams to one input [B, T, D], in float32, cast back to the streams' dtype."""
    return jnp.sum(pre_BTZ[..., None] * streams_BTZD.astype(jnp.float32), axis=2).astype(streams_BTZD.dtype)


def expand(mix: Mixes, y_BTD, streams_BTZD):
    """Adds a sublayer's output: stream k becomes post_k y + sum over j of comb[j, k] stream_j, in float32."""
    streams = streams_BTZD.astype(jnp.float32)
    mixed = jnp.sum(mix.comb[..., None] * streams[..., :, None, :], axis=2)
    added = mix.post[..., None] * y_BTD.astype(jnp.float32)[..., None, :]
    return (added + mixed).astype(streams_BTZD.dtype)
