"""Block-max pooling of index scores: what a block of entries could offer a query."""

from pallas_kernels import debug, dispatch
from pallas_kernels.block_max import mosaic_tpu, reference

BACKENDS = {"reference": reference.block_max, "mosaic_tpu": mosaic_tpu.block_max}


def block_max(scores_BTS, visible_BT, *, block_size: int, implementation: str | None = None):
    """Takes the best visible score in each block of `block_size` entries.

    Args:
      scores_BTS: f32 index scores; values at invisible entries are ignored.
      visible_BT: i32 entry counts; query t sees entries 0 .. visible_BT[b, t] - 1.
      block_size: entries per block; the last block may be short.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [B, T, ceil(S / block_size)], -inf where a block shows no entry. NaN scores count as -inf. Exact: a maximum
      never rounds, so every backend agrees to the bit, but for the sign of a zero that ties with the other.
    """
    debug.report_nans("block_max", reference.count_nans, scores_BTS, visible_BT)
    return dispatch.run("block_max", BACKENDS, implementation, scores_BTS, visible_BT, block_size=block_size)
