"""Single-pass manifold-constrained hyper-connections: Z parallel residual streams (architecture section 2).

A sublayer's mixes come from the streams that enter it; its `pre` collapses the streams for the NEXT sublayer.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.products import contract
from pallas_kernels.sinkhorn import sinkhorn
from v41jax.config import Config
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
    Z, lead = cfg.hc_mult, streams_BTZD.shape[:2]
    flat = streams_BTZD.reshape(lead[0] * lead[1], -1).astype(jnp.float32)
    mixed = sinkhorn(
        _products(flat, params[f"hc_{sublayer}_fn"]), params[f"hc_{sublayer}_scale"], params[f"hc_{sublayer}_base"],
        streams=Z, iterations=cfg.hc_sinkhorn_iters, eps=cfg.hc_eps, width=flat.shape[1], norm_eps=cfg.rms_norm_eps,
    ).reshape(*lead, -1)  # fmt: skip
    return split(mixed, Z)


def split(mixed, streams: int) -> Mixes:
    """Names the parts of f32 [..., (2 + Z) Z], Z = `streams`."""
    Z = streams
    return Mixes(mixed[..., :Z], mixed[..., Z : 2 * Z], mixed[..., 2 * Z :].reshape(*mixed.shape[:-1], Z, Z))


def _products(x_RW, weight_MW):
    """Multiplies each row with every vector, and in the last column with itself: f32 [R, M + 1].

    A single row does both in one product: on GPUs that is two launches of a decode step instead of four.
    """
    if x_RW.shape[0] == 1:
        return contract("rw,mw->rm", x_RW, jnp.concatenate([weight_MW, x_RW]))
    square_R1 = jnp.sum(jnp.square(x_RW), axis=-1, keepdims=True)
    return jnp.concatenate([contract("rw,mw->rm", x_RW, weight_MW), square_R1], axis=-1)


def collapse(pre_BTZ, streams_BTZD):
    """Sums the streams to one input [B, T, D], in float32, cast back to the streams' dtype."""
    return jnp.sum(pre_BTZ[..., None] * streams_BTZD.astype(jnp.float32), axis=2).astype(streams_BTZD.dtype)


def expand(mix: Mixes, y_BTD, streams_BTZD):
    """Adds a sublayer's output: stream k becomes post_k y + sum over j of comb[j, k] stream_j, in float32."""
    streams = streams_BTZD.astype(jnp.float32)
    mixed = jnp.sum(mix.comb[..., None] * streams[..., :, None, :], axis=2)
    added = mix.post[..., None] * y_BTD.astype(jnp.float32)[..., None, :]
    return (added + mixed).astype(streams_BTZD.dtype)
