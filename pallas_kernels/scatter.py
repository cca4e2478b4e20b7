"""Sums of products that fall on the rows queries have read: the gradient of gathered rows, without their scatter-add.

Row index[b, t, k] receives the sum over n of weight[b, t, n, k] times vector[b, t, n]. Where rows are few, the weights
alone are put where they belong, [B, T, N, S], and one matrix product makes the sums. Where they are many, the products
of every query are made and added row by row; XLA on GPU adds repeated indices in any order, so there these sums are
made of integers, whose order does not matter. Either way the same call gives the same bits.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.blocks import fitting, split
from pallas_kernels.products import EXACT

# An addition of a number to a row is done twice, once for each part, and costs an H200 some 15 ps; a bfloat16 weight
# that is cleared and read once costs 1, and its multiplications by 64 to 512 channels up to 2 more.
WEIGHTS_AN_ADDITION = 16


def dense(heads: int, channels: int, read: int, rows: int) -> bool:
    """Whether queries of N heads that read K of S rows of H channels put weights where they belong."""
    return heads * rows <= WEIGHTS_AN_ADDITION * read * channels


def add_products(weight_BTNK, vector_BTNH, index_BTK, rows: int):
    """Sums products by row.

    Args:
      weight_BTNK, vector_BTNH: of one dtype, finite.
      index_BTK: i32, -1 for none; a row that is named twice receives both.
      rows: S.
    Returns:
      f32 [B, S, H].
    """
    B, T, N, K = weight_BTNK.shape
    H = vector_BTNH.shape[3]
    if K == 0 or T == 0:
        return jnp.zeros((B, rows, H), jnp.float32)
    if not dense(N, H, K, rows):
        return _add_rows(jnp.einsum("btnk,btnh->btkh", weight_BTNK, vector_BTNH, **EXACT), index_BTK, rows)
    block = min(fitting(B * N * rows * weight_BTNK.dtype.itemsize), T)
    batch, query = jnp.arange(B, dtype=jnp.int32)[:, None, None], jnp.arange(block, dtype=jnp.int32)[:, None]

    def step(total, block_of):
        weight, vector, index = block_of
        placed = jnp.zeros((B, block, N, rows), weight.dtype)
        index = jnp.where(index < 0, rows, index)
        placed = placed.at[batch, query, :, index].add(jnp.swapaxes(weight, 2, 3), mode="drop")
        return total + jnp.einsum("btns,btnh->bsh", placed, vector, **EXACT), None

    blocks = split(weight_BTNK, block, 0), split(vector_BTNH, block, 0), split(index_BTK, block, -1)
    return lax.scan(step, jnp.zeros((B, rows, H), jnp.float32), blocks)[0]


def _add_rows(row_BTKH, index_BTK, rows: int):
    index_BTK = jnp.where(index_BTK < 0, rows, index_BTK)
    batch = jnp.arange(index_BTK.shape[0], dtype=jnp.int32)[:, None, None]

    def add(row_BTKH):
        total = jnp.zeros((row_BTKH.shape[0], rows, row_BTKH.shape[3]), row_BTKH.dtype)
        return total.at[batch, index_BTK].add(row_BTKH, mode="drop")

    return lax.platform_dependent(row_BTKH, cuda=functools.partial(add_in_any_order, add), default=add)


@jax.custom_vjp
def gathered_products(query_BTIJ, row_BSJ, index_BTK):
    """Multiplies each query's vectors with its own rows.

    Args:
      query_BTIJ, row_BSJ: float, of one dtype; a row that no query names may hold anything.
      index_BTK: i32 rows, -1 for none.
    Returns:
      f32 [B, T, I, K], 0 where there is none. Rows receive their gradient summed in float32.
    """
    return _gathered_products(query_BTIJ, row_BSJ, index_BTK)


def _gathered_products(query_BTIJ, row_BSJ, index_BTK):
    rows = _named_rows(*map(jnp.asarray, (row_BSJ, index_BTK)))  # constants arrive as NumPy arrays
    return jnp.einsum("btij,btkj->btik", query_BTIJ, rows, **EXACT)


def _named_rows(row_BSJ, index_BTK):
    batch = jnp.arange(index_BTK.shape[0], dtype=jnp.int32)[:, None, None]
    rows = row_BSJ.at[batch, jnp.maximum(index_BTK, 0)].get(mode="clip")
    return jnp.where(index_BTK[..., None] >= 0, rows, 0)


def _gathered_products_backward(arrays, cotangent_BTIK):
    query_BTIJ, row_BSJ, index_BTK = map(jnp.asarray, arrays)
    cotangent = cotangent_BTIK.astype(query_BTIJ.dtype)
    d_query = jnp.einsum("btik,btkj->btij", cotangent, _named_rows(row_BSJ, index_BTK), **EXACT)
    d_rows = add_products(cotangent, query_BTIJ, index_BTK, row_BSJ.shape[1])
    return d_query.astype(query_BTIJ.dtype), d_rows.astype(row_BSJ.dtype), np.zeros(index_BTK.shape, jax.dtypes.float0)


gathered_products.defvjp(lambda *arrays: (_gathered_products(*arrays), arrays), _gathered_products_backward)


def add_in_any_order(add, rows_BTKH):
    """Makes the sums of `add` from sums of integers: exact to 2^-30 of the largest row, or NaN if one is not finite.

    A row is cut into parts of `bits` bits, few enough that as many as there are rows add up below 2^31.
    """
    _, T, K, _ = rows_BTKH.shape
    bits = 30 - (T * K - 1).bit_length()
    top = jnp.max(jnp.abs(rows_BTKH))
    finite = jnp.isfinite(top)
    _, exponent = jnp.frexp(jnp.where(finite, top, 0))
    unit = jnp.exp2(jnp.maximum(exponent - bits, -126).astype(jnp.float32))
    rest, total = jnp.where(finite, rows_BTKH, 0) / unit, 0
    for part in range(-(-30 // bits)):
        whole = jnp.round(rest)
        total += add(whole.astype(jnp.int32)).astype(jnp.float32) * jnp.float32(2.0 ** (-bits * part))
        rest = (rest - whole) * jnp.float32(2.0**bits)
    return jnp.where(finite, total * unit, jnp.nan)
