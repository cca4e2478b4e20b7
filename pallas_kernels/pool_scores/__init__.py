"""Lightning-indexer scores inside each query's candidate pool only: the cost does not grow with the context."""

from pallas_kernels import debug, dispatch
from pallas_kernels.pool_scores import mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "reference": reference.pool_scores,
    "mosaic_gpu": mosaic_gpu.pool_scores,
    "mosaic_tpu": mosaic_tpu.pool_scores,
}


def pool_scores(
    query_BTIJ,
    weight_BTI,
    codes_BSJ,
    scales_BSG,
    block_BTC,
    visible_BT,
    *,
    format: str | None,
    block_size: int,
    implementation: str | None = None,
):
    """Scores the entries of each query's chosen blocks.

    Args:
      query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, format: as for `index_scores`.
      block_BTC: i32 block ids, in any order; -1 for none.
      block_size: entries in a block; the last block of S may be short.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [B, T, C * block_size]; position c * block_size + i is entry block_BTC[..., c] * block_size + i; -inf where
      that is invisible, past S or of no block, and where the score is NaN.
    """
    arrays = query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT
    debug.report_nans("pool_scores", reference.count_nans, *arrays, format=format, block_size=block_size)
    return dispatch.run("pool_scores", BACKENDS, implementation, *arrays, format=format, block_size=block_size)
