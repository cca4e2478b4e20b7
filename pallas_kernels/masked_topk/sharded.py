"""Exact top-k of rows whose entries are split over devices: each device chooses its k best, then all choose of those.

Any of the k best of a row is among the k best of its shard. Gathered in the order of the shards, candidates ascend by
position, so the second choice breaks ties as the first does: the lower position wins.

Bytes over the network: 8 k a row and device, whatever the length of the row.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.masked_topk import masked_topk


def masked_topk_over(mesh, axis_name: str, scores_RS, length_R, *, k: int):
    """Chooses the k best positions of rows whose entries are split over an axis of a mesh.

    Args:
      mesh, axis_name: the axis of `mesh` that splits S; it must divide it.
      scores_RS, length_R, k: as for `masked_topk`; rows are on every device.
    Returns:
      i32 [R, k] on every device: what `masked_topk` returns on one, to the bit.
    """
    devices, entries = mesh.shape[axis_name], scores_RS.shape[1]
    if entries % devices:
        raise ValueError(
            f"{entries} entries over {devices} devices of axis {axis_name!r}; pad them with -inf to a multiple"
        )
    choose = functools.partial(masked_topk_in_shard, k=k, axis_name=axis_name)
    split = PartitionSpec(None, axis_name)
    return dispatch.per_shard(choose, mesh, (split, PartitionSpec()), PartitionSpec())(scores_RS, length_R)


def masked_topk_in_shard(scores_RS_local, length_R, *, k: int, axis_name):
    """Does the same inside a `shard_map` that splits S.

    Args:
      scores_RS_local: f32 [R, S / devices], this device's entries; shards are equal and in the order of the axis.
      length_R: i32 [R] lengths of the whole rows, the same on every device.
      k: positions wanted, 1 or more; it may exceed a shard and the row.
      axis_name: the mesh axis, or axes, that split S.
    Returns:
      i32 [R, k] positions in the whole row, the same on every device: what `masked_topk` of the whole row returns.
    """
    R, width = scores_RS_local.shape
    if width == 0:
        return jnp.full((R, k), -1, jnp.int32)
    first = lax.axis_index(axis_name).astype(jnp.int32) * width
    local_RK = masked_topk(scores_RS_local, jnp.clip(length_R.astype(jnp.int32) - first, 0, width), k=min(k, width))
    best_RK = jnp.take_along_axis(scores_RS_local, jnp.maximum(local_RK, 0), axis=1)
    best_RK = jnp.where(local_RK < 0, -jnp.inf, best_RK)
    best_RC, position_RC = (lax.all_gather(a, axis_name, axis=1, tiled=True) for a in (best_RK, local_RK + first))
    choice_RK = masked_topk(best_RC, k=k)
    position_RK = jnp.take_along_axis(position_RC, jnp.maximum(choice_RK, 0), axis=1)
    return jnp.where(choice_RK < 0, -1, position_RK)
