"""Block-max pooling of index scores: what a block of entries could offer a query."""

from pallas_kernels.block_max import reference


def block_max(scores_BTS, visible_BT, *, block_size: int):
    """Takes the best visible score in each block of `block_size` entries.

    Args:
      scores_BTS: f32 index scores; values at invisible entries are ignored.
      visible_BT: i32 entry counts; query t sees entries 0 .. visible_BT[b, t] - 1.
      block_size: entries per block; the last block may be short.
    Returns:
      f32 [B, T, ceil(S / block_size)], -inf where a block shows no entry. NaN scores count as -inf. Exact: a maximum
      never rounds.
    """
    return reference.block_max(scores_BTS, visible_BT, block_size=block_size)
