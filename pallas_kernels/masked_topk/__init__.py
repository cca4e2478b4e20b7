"""Exact top-k of a masked row."""

from pallas_kernels.masked_topk import reference


def masked_topk(scores, *, k: int):
    """Chooses the k best positions of the last axis; greater first, and on ties the lower position.

    Args:
      scores: f32 [..., S]; -inf and NaN are never chosen; +inf may be. -0 and +0 tie.
      k: positions wanted, 1 or more; it may exceed S.
    Returns:
      i32 [..., k] ascending positions, then -1 where fewer than k can be chosen. Exact.
    """
    return reference.masked_topk(scores, k=k)
