"""Mixing weights of hyper-connections: sigmoids, and a matrix made nearly doubly stochastic by Sinkhorn iterations."""

from pallas_kernels import dispatch
from pallas_kernels.sinkhorn import mosaic_gpu, reference

BACKENDS = {"reference": reference.sinkhorn, "mosaic_gpu": mosaic_gpu.sinkhorn}


def sinkhorn(logits_RM, *, streams: int, iterations: int, eps: float, implementation: str | None = None):
    """Turns mixing logits into weights (architecture section 2, reference `hc_split_sinkhorn`).

    Args:
      logits_RM: f32, M = (2 + Z) Z columns a row: Z for `pre`, Z for `post`, Z x Z for `comb`, row by row.
      streams: Z. iterations: how often columns are divided by their sums. eps: added to weights and sums.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [R, M]: pre = sigmoid + eps; post = 2 sigmoid; comb = softmax + eps, columns then rows divided in turn, short
      of convergence. Sums of Z terms, in the backend's order.
    """
    return dispatch.run(
        "sinkhorn", BACKENDS, implementation, logits_RM, streams=streams, iterations=iterations, eps=eps
    )
