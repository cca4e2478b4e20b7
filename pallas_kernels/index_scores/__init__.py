"""Lightning-indexer scores over packed index keys."""

from pallas_kernels import debug, dispatch
from pallas_kernels.index_scores import mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "reference": reference.index_scores,
    "mosaic_gpu": mosaic_gpu.index_scores,
    "mosaic_tpu": mosaic_tpu.index_scores,
}


def index_scores(
    query_BTIJ,
    weight_BTI,
    codes_BSJ,
    scales_BSG,
    visible_BT,
    *,
    format: str | None,
    block_size: int = 1,
    implementation: str | None = None,
):
    """Scores every visible key, sum over heads of weight x relu(query . key), and keeps each block's best.

    Args:
      query_BTIJ: float queries of I heads, rounded to `format` like the keys: bfloat16 holds them exactly.
      weight_BTI: f32, of either sign.
      codes_BSJ, scales_BSG: uint8 planes of the keys (`quantize`), S the capacity.
      visible_BT: i32; query t sees keys below it. Work follows the largest of each sequence, not S.
      format: of the keys, a key of FORMATS; None: `codes_BSJ` is float [B, S, J] and the scales are not read.
      block_size: entries that share one result, their maximum; 1: the scores themselves. No array of S scores a query
        exists then, only of ceil(S / block_size).
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [B, T, ceil(S / block_size)]; -inf where nothing is visible; a NaN score counts as -inf. Products are exact,
      sums accumulate in float32 in the backend's order. ReLU makes exact zeros common, and those are exact.
    """
    arrays = query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT
    debug.report_nans("index_scores", reference.count_nans, *arrays, format=format)
    return dispatch.run("index_scores", BACKENDS, implementation, *arrays, format=format, block_size=block_size)
