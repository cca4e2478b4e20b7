"""Gather packed rows, dequantise, two einsums around a softmax, some queries at a time."""

import jax.numpy as jnp

from pallas_kernels.blocks import by_query_block, fitting
from pallas_kernels.products import EXACT
from pallas_kernels.quantize.reference import dequantize


def gather_attention(
    query_BTNH, sink_N, window, window_index_BTW, entries, entry_index_BTK, *, scale, window_format, entry_format
):
    """See the contract."""

    def attend(query, *index):
        rows, valid = gather(window, entries, *index, window_format, entry_format, query.dtype)
        return sink_attention(query, rows, valid, sink_N, scale=scale)

    block = queries_at_once(query_BTNH, window_index_BTW, entry_index_BTK)
    return by_query_block(attend, block, query_BTNH, window_index_BTW, entry_index_BTK)


def queries_at_once(query_BTNH, *index):
    """Bounds the rows of a block of queries in float32."""
    B, _, _, H = query_BTNH.shape
    return fitting(4 * B * H * sum(0 if one is None else one.shape[2] for one in index))


def sink_attention(query_BTNH, rows_BTKH, valid_BTK, sink_N, *, scale: float):
    """Attends each query to its own rows, zeros where not valid."""
    scores = jnp.einsum("btnh,btkh->btnk", query_BTNH, rows_BTKH, **EXACT) * jnp.float32(scale)
    scores = jnp.where(valid_BTK[:, :, None], scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1), sink_N)  # finite, so no -inf - -inf
    weights = jnp.exp(scores - top[..., None])
    total = weights.sum(-1) + jnp.exp(sink_N - top)
    weights = (weights / total[..., None]).astype(query_BTNH.dtype)
    return jnp.einsum("btnk,btkh->btnh", weights, rows_BTKH, **EXACT).astype(query_BTNH.dtype)


def gather(window, entries, window_index, entry_index, window_format, entry_format, dtype):
    """Reads every query's rows [B, T, W + K, H], zeros where there is none, and which are there."""
    parts = [(window, window_index, window_format)]
    if entries is not None:
        parts.append((entries, entry_index, entry_format))
    rows = [_take(planes, index, format, dtype) for planes, index, format in parts]
    index = jnp.concatenate([index for _, index, _ in parts], axis=2)
    return jnp.concatenate(rows, axis=2), index >= 0


def _take(planes, index_BTK, format, dtype):
    batch = jnp.arange(index_BTK.shape[0], dtype=jnp.int32)[:, None, None]
    codes, scales = (plane.at[batch, jnp.maximum(index_BTK, 0)].get(mode="clip") for plane in planes)
    rows = codes.astype(dtype) if format is None else dequantize(codes, scales, format=format, dtype=dtype)
    return jnp.where(index_BTK[..., None] >= 0, rows, 0)  # NaN in a row that does not count must not spread
