"""Compressor: m tokens become one entry of the compressed KV cache (architecture section 5).

Groups do not overlap and have no position bias. A group that a call leaves incomplete waits in the pool as its rows of
values and gates, so that any split of a prompt makes the same entries.
"""

import dataclasses

import jax
import jax.numpy as jnp

from v41jax.cache import EntryPool, Span, take_rows
from v41jax.config import Config, LayerSpec
from v41jax.layers import project, rms_norm
from v41jax.tree import ArraySpec, Specs


def specs(cfg: Config, layer: LayerSpec) -> Specs:
    """Describes the compressor's weights. They stay in high precision."""
    projection = ArraySpec(shape=(cfg.head_dim, cfg.hidden_size), axes=("head_dim", "embed"))
    gate = {"wgate": projection} if layer.ratio > 1 else {}
    return {"wkv": projection, **gate, "norm": ArraySpec(shape=(cfg.head_dim,), axes=("head_dim",), init="ones")}


def compress(params, x_BTD, pool: EntryPool, *, span: Span, ratio: int, cfg: Config):
    """Pools each complete group of `ratio` tokens, softmax over its gates channel by channel.

    Args:
      x_BTD: normalised input of the layer, all tokens of the call.
      pool: supplies the rows that wait from earlier calls.
      ratio: m, tokens an entry stands for.
    Returns:
      latents [B, G, H] in x's dtype, normalised and not yet rotated, G = groups the call may complete;
      i32 [B] how many of them are complete; the pool with the new part-filled group.
    Source: report 2.3.1; reference `Compressor`.
    """
    kv = project(x_BTD, params["wkv"], dtype=jnp.float32)
    if ratio == 1:
        return rms_norm(kv, params["norm"], cfg.rms_norm_eps).astype(x_BTD.dtype), span.length_B, pool
    gate = project(x_BTD, params["wgate"], dtype=jnp.float32)
    waiting_B = span.start_B % ratio
    arrived_B = waiting_B + span.length_B
    complete_B = arrived_B // ratio
    groups = (span.width + ratio - 1) // ratio

    def row(number_BT):
        """Where waiting and new rows, counted from the oldest, stand behind each other."""
        return jnp.where(number_BT < waiting_B[:, None], number_BT, number_BT - waiting_B[:, None] + ratio - 1)

    member = jnp.broadcast_to(jnp.arange(groups * ratio, dtype=jnp.int32), (x_BTD.shape[0], groups * ratio))
    left = complete_B[:, None] * ratio + jnp.arange(ratio - 1, dtype=jnp.int32)
    waits = (left < arrived_B[:, None])[..., None]

    def regroup(partial, new):
        rows = jnp.concatenate([partial, new], axis=1)
        grouped = take_rows(rows, row(member)).reshape(rows.shape[0], groups, ratio, rows.shape[-1])
        return grouped, jnp.where(waits, take_rows(rows, row(left)), 0)

    kv, partial_kv = regroup(pool.partial_kv, kv)
    gate, partial_gate = regroup(pool.partial_gate, gate)
    latent = jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2)
    latent = rms_norm(latent, params["norm"], cfg.rms_norm_eps).astype(x_BTD.dtype)
    return latent, complete_B, dataclasses.replace(pool, partial_kv=partial_kv, partial_gate=partial_gate)
