"""Attention over the window and the selected entries, with a sink, and its low-rank query and output (section 5).

One latent is key and value for all heads. Rows are read packed and dequantised query block by query block.
"""

import jax
import jax.numpy as jnp

from v41jax import quant
from v41jax.cache import Span, take_rows, window_index, write_window
from v41jax.config import Config
from v41jax.layers import by_query_block, einsum, project, rms_norm
from v41jax.quant import Packed
from v41jax.rope import rotate, unrotate
from v41jax.tree import ArraySpec, Specs

QUERY_BLOCK = 32  # queries whose rows are dequantised at a time: bounds [B, QUERY_BLOCK, W + K, H]


def specs(cfg: Config) -> Specs:
    """Describes the weights every layer's attention has."""
    D, N, H, R = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim, cfg.q_lora_rank
    out = cfg.o_groups * cfg.o_lora_rank

    def dense(shape, axes):
        return ArraySpec(shape=shape, axes=axes, format=cfg.dense_format)

    return {
        "attn_sink": ArraySpec(shape=(N,), axes=("heads",), init="zeros", dtype="float32", suffix=""),
        "wq_a": dense((R, D), ("q_lora", "embed")),
        "q_norm": ArraySpec(shape=(R,), axes=("q_lora",), init="ones"),
        "wq_b": dense((N * H, R), ("heads", "q_lora")),
        "wkv": dense((H, D), ("head_dim", "embed")),
        "kv_norm": ArraySpec(shape=(H,), axes=("head_dim",), init="ones"),
        "wo_a": dense((out, N * H // cfg.o_groups), ("heads", None)),
        "wo_b": dense((D, out), ("embed", "heads")),
    }


def query_latent(params, x_BTD, *, cfg: Config):
    """Projects to the normalised low-rank query [B, T, R], which the indexer reads too."""
    latent = project(x_BTD, params["wq_a"], activation=cfg.formats.activation)
    return rms_norm(latent, params["q_norm"], cfg.rms_norm_eps)


def attend(
    params,
    x_BTD,
    latent_BTR,
    window: Packed,
    entries,
    entry_BTK,
    *,
    span: Span,
    held_B,
    first_B,
    frequency,
    cfg: Config,
):
    """Attends to the window and the selected entries, and appends the call's rows to the window.

    Args:
      x_BTD: normalised input of the layer.
      latent_BTR: from `query_latent`.
      window: the ring, Packed [B, W, H], before this call.
      entries: main KV, Packed [B, S, H], or None in a window-only layer.
      entry_BTK: i32 selected entries, -1 where none; None with `entries` None.
      span, held_B, first_B: see `cache.window_index`.
      frequency: the layer's rotation table.
    Returns:
      [B, T, D] in x's dtype, and the ring with the new rows.
    Source: report 2.2; reference `Attention.forward`.
    """
    act = cfg.formats.activation
    N, H = cfg.num_attention_heads, cfg.head_dim
    position_BT = span.position_BT
    query = project(latent_BTR, params["wq_b"], activation=act)
    query = rotate(query.reshape(*query.shape[:-1], N, H), position_BT[..., None], frequency)
    latent = rms_norm(project(x_BTD, params["wkv"], activation=act), params["kv_norm"], cfg.rms_norm_eps)
    rows = quant.quantize(rotate(latent, position_BT, frequency), cfg.formats.window)

    ring_and_rows = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), window, rows)
    index_BTW = window_index(cfg.sliding_window, span, held_B, first_B)

    def attend_block(query, window_index, entry_index):
        read = quant.dequantize(take_rows(ring_and_rows, window_index), query.dtype)
        index = window_index
        if entries is not None:
            read = jnp.concatenate([read, quant.dequantize(take_rows(entries, entry_index), query.dtype)], axis=2)
            index = jnp.concatenate([index, entry_index], axis=2)
        return sink_attention(query, read, index >= 0, params["attn_sink"], scale=H**-0.5)

    out = by_query_block(attend_block, QUERY_BLOCK, query, index_BTW, entry_BTK)
    out = unrotate(out, position_BT[..., None], frequency)
    return _project_out(params, out, cfg=cfg), write_window(window, rows, span)


def sink_attention(query_BTNH, rows_BTKH, valid_BTK, sink_N, *, scale: float):
    """Attends each query to its own rows; the sink joins the denominator only.

    Args:
      query_BTNH: float. rows_BTKH: float, key and value at once. valid_BTK: which rows count.
      sink_N: f32, one finite logit a head. scale: of the dot products.
    Returns:
      [B, T, N, H] in the query's dtype; exactly 0 for a query with no row. Softmax in float32.
    """
    rows_BTKH = jnp.where(valid_BTK[..., None], rows_BTKH, 0)  # NaN in a row that does not count must not spread
    scores = einsum("btnh,btkh->btnk", query_BTNH, rows_BTKH, dtype=jnp.float32) * jnp.float32(scale)
    scores = jnp.where(valid_BTK[:, :, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1), sink_N)  # finite, so no -inf - -inf
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1) + jnp.exp(sink_N - top)
    weights = (weights / total[..., None]).astype(query_BTNH.dtype)
    return einsum("btnk,btkh->btnh", weights, rows_BTKH, dtype=query_BTNH.dtype)


def _project_out(params, out_BTNH, *, cfg: Config):
    """Grouped low-rank output. wo_a multiplies unrounded activations: the reference keeps this product in bfloat16."""
    groups = out_BTNH.reshape(*out_BTNH.shape[:2], cfg.o_groups, -1)
    weight = params["wo_a"]
    if isinstance(weight, Packed):
        weight = quant.dequantize(weight, groups.dtype)
    weight = weight.reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    low = einsum("btgd,grd->btgr", groups, weight, dtype=groups.dtype)
    return project(low.reshape(*low.shape[:2], -1), params["wo_b"], activation=cfg.formats.activation)
