"""Mixing weights of hyper-connections: sigmoids, and a matrix made nearly doubly stochastic by Sinkhorn iterations."""

from pallas_kernels import dispatch
from pallas_kernels.sinkhorn import mosaic_gpu, reference

BACKENDS = {"reference": reference.sinkhorn, "mosaic_gpu": mosaic_gpu.sinkhorn}


def sinkhorn(
    product_RP,
    scale,
    base_M,
    *,
    streams: int,
    iterations: int,
    eps: float,
    width: int,
    norm_eps: float,
    implementation: str | None = None,
):
    """Turns what the streams' mixing projection gave into weights (architecture section 2, `hc_split_sinkhorn`).

    Args:
      product_RP: f32, the products of a row x with M = (2 + Z) Z mixing vectors, Z for `pre`, Z for `post`, Z x Z for
        `comb`, row by row; and in the last column x with itself, of which RMSNorm is made here: P = M + 1.
      scale: f32 [3], of each kind. base_M: f32.
      streams: Z. iterations: how often columns are divided by their sums. eps: added to weights and sums.
      width, norm_eps: channels of x, and RMSNorm's epsilon.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [R, M]: pre = sigmoid + eps; post = 2 sigmoid; comb = softmax + eps, columns then rows divided in turn, short
      of convergence. Sums of Z terms, in the backend's order.
    """
    return dispatch.run(
        "sinkhorn", BACKENDS, implementation, product_RP, scale, base_M,
        streams=streams, iterations=iterations, eps=eps, width=width, norm_eps=norm_eps,
    )  # fmt: skip
