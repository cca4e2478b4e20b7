"""Sparse gather-attention: every query attends to its own rows of packed caches, with a sink."""

import functools

import jax

from pallas_kernels import dispatch
from pallas_kernels.gather_attention import backward, mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "reference": reference.gather_attention,
    "mosaic_gpu": mosaic_gpu.gather_attention,
    "mosaic_tpu": mosaic_tpu.gather_attention,
}


def gather_attention(
    query_BTNH,
    sink_N,
    window,
    window_index_BTW,
    entries=None,
    entry_index_BTK=None,
    latents=(None, None),
    *,
    scale: float,
    window_format: str | None,
    entry_format: str | None = None,
    implementation: str | None = None,
):
    """Attends each query to window rows and selected entries; the sink joins the denominator only.

    Args:
      query_BTNH: float.
      sink_N: f32, one finite logit a head.
      window: (codes, scales), planes of P window rows [B, P, H]; a row is key and value at once, for all heads.
      window_index_BTW: i32 rows of `window`; -1, anywhere, for none.
      entries: (codes, scales), planes of S entries [B, S, H]; None: there are none.
      entry_index_BTK: i32, likewise.
      latents: floats [B, P, H] and [B, S, H] that `window` and `entries` were quantised from; only their gradient is
        used: it passes straight through the quantiser. None: the rows get no gradient.
      scale: of the dot products; H^-0.5 of the query's real head.
      window_format, entry_format: keys of FORMATS; None: codes are float rows and scales are not read.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      [B, T, N, H] in the query's dtype; exactly 0 for a query with no row. Softmax in float32 over
      p_j = exp(s_j - m) / (sum exp(s - m) + exp(sink - m)), m = max(max_j s_j, sink). Rows that do not count may hold
      anything, NaN too. Differentiable in query, sink and latents.
    """
    static = (scale, window_format, entry_format, implementation)
    return _attend(static, query_BTNH, sink_N, window, window_index_BTW, entries, entry_index_BTK, latents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query_BTNH, sink_N, window, window_index_BTW, entries, entry_index_BTK, latents):
    del latents
    scale, window_format, entry_format, implementation = static
    return dispatch.run(
        "gather_attention", BACKENDS, implementation, query_BTNH, sink_N, window, window_index_BTW, entries,
        entry_index_BTK, scale=scale, window_format=window_format, entry_format=entry_format,
    )  # fmt: skip


def _forward(static, *arrays):
    return _attend(static, *arrays), arrays


_attend.defvjp(_forward, backward.gather_attention)
