"""Attention over the window and the selected entries, with a sink, and its low-rank query and output (section 5).

One latent is key and value for all heads. Rows are read packed; see `pallas_kernels.gather_attention`.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.gather_attention import gather_attention
from v41jax import quant
from v41jax.cache import Span, window_index, write_window
from v41jax.config import Config
from v41jax.layers import group_project, project, rms_norm
from v41jax.quant import Packed
from v41jax.rope import rotate, turn, unrotate
from v41jax.tree import ArraySpec, Specs


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


def queries(params, latent_BTR, position_BT, *, frequency, cfg: Config):
    """Makes the rotated queries [B, T, N, H] of all heads from the low-rank query."""
    query = project(latent_BTR, params["wq_b"], activation=cfg.formats.activation)
    query = query.reshape(*query.shape[:-1], cfg.num_attention_heads, cfg.head_dim)
    return rotate(query, position_BT[..., None], frequency)


def window_latent(params, x_BTD, *, cfg: Config):
    """Makes each token's window row [B, T, H], not yet rotated or rounded."""
    return rms_norm(
        project(x_BTD, params["wkv"], activation=cfg.formats.activation), params["kv_norm"], cfg.rms_norm_eps
    )


def output(params, out_BTNH, position_BT, *, frequency, cfg: Config):
    """Rotates what the heads read back and projects it to [B, T, D]."""
    return _project_out(params, unrotate(out_BTNH, position_BT[..., None], frequency), cfg=cfg)


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
    position_BT = span.position_BT
    query = queries(params, latent_BTR, position_BT, frequency=frequency, cfg=cfg)
    latent = window_latent(params, x_BTD, cfg=cfg)
    rows = quant.rotate_quantize(latent, turn(position_BT, frequency), cfg.formats.window)
    window, read, index_BTW = _window_rows(window, rows, span, held_B, first_B)
    out = gather_attention(
        query, params["attn_sink"], (read.codes, read.scales), index_BTW,
        None if entries is None else (entries.codes, entries.scales), entry_BTK,
        scale=cfg.head_dim**-0.5, window_format=read.format, entry_format=None if entries is None else entries.format,
    )  # fmt: skip
    return output(params, out, position_BT, frequency=frequency, cfg=cfg), window


def _window_rows(window: Packed, rows: Packed, span: Span, held_B, first_B):
    """Writes the call's rows; returns the ring, the rows its queries read, and where: i32 [B, T, W]."""
    slots = window.codes.shape[1]
    written = write_window(window, rows, span)
    if span.width == 1:  # the row that the new one replaces is out of its sight
        return written, written, window_index(slots, span, held_B, first_B, in_ring=True)
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), window, rows)
    return written, both, window_index(slots, span, held_B, first_B)


def _project_out(params, out_BTNH, *, cfg: Config):
    """Grouped low-rank output. wo_a multiplies unrounded activations: the reference keeps this product in bfloat16."""
    groups = out_BTNH.reshape(-1, cfg.o_groups, out_BTNH.shape[2] * out_BTNH.shape[3] // cfg.o_groups)
    low = group_project(groups, params["wo_a"]).astype(out_BTNH.dtype)
    return project(low.reshape(*out_BTNH.shape[:2], -1), params["wo_b"], activation=cfg.formats.activation)
