"""Work in blocks of queries, so that what a block makes on the way stays small."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK_BYTES = 2**28


def fitting(nbytes: int) -> int:
    """How many pieces of work that make so many bytes on the way may run at once: together BLOCK_BYTES, at least 1."""
    return max(1, BLOCK_BYTES // max(1, nbytes))


def by_query_block(fn: Callable, block: int, *arrays_BT):
    """Runs `fn` on blocks of query tokens one after another, so that what it makes inside is [B, block, ...].

    `fn` takes and returns trees of arrays whose second axis is the query; queries must not depend on each other.
    The last block is padded with copies of the last query, whose results are dropped.
    """
    tokens = jax.tree.leaves(arrays_BT)[0].shape[1]
    if tokens <= block:
        return fn(*arrays_BT)
    blocks = lax.map(lambda xs: fn(*xs), jax.tree.map(lambda a: split(a, block), arrays_BT))
    return jax.tree.map(lambda a: join(a)[:, :tokens], blocks)


def split(a, block: int, fill=None):
    """Cuts the second axis, of queries, into leading blocks; the last is filled up, None: with copies of the last."""
    blocks = -(-a.shape[1] // block)
    widths = [(0, 0), (0, blocks * block - a.shape[1])] + [(0, 0)] * (a.ndim - 2)
    a = jnp.pad(a, widths, mode="edge") if fill is None else jnp.pad(a, widths, constant_values=fill)
    return jnp.moveaxis(a.reshape(a.shape[0], blocks, block, *a.shape[2:]), 1, 0)


def join(a):
    """Undoes `split`, but for what was filled up."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], a.shape[1] * a.shape[2], *a.shape[3:])
