"""Sums of the losses over tokens; the step divides by tokens, all micro-batches together (training.md)."""

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import by_query_block
from v41jax import moe
from v41jax.config import Config
from v41jax.layers import project

TOKEN_BLOCK = 256  # columns whose logits exist at a time: [B, TOKEN_BLOCK, V]


def language_model(x_BTD, head_VD, tokens_BT, predicted_BT):
    """Sums the cross-entropy of the next token.

    Args:
      x_BTD: float, input of the head.
      head_VD: float, [V, D].
      tokens_BT: i32.
      predicted_BT: bool, the columns whose next token counts.
    Returns:
      f32 scalar, nats. Logits are made TOKEN_BLOCK columns at a time, and again in the backward pass.
    """
    next_BT = jnp.where(predicted_BT, jnp.roll(tokens_BT, -1, axis=1), 0)

    @jax.checkpoint
    def nats(x, token, counts):
        logits = project(x, head_VD, dtype=jnp.float32)
        chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
        return jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - chosen, 0)

    return jnp.sum(by_query_block(nats, TOKEN_BLOCK, x_BTD, next_BT, predicted_BT))


def kl(log_mass_BTE, scores_BTE, seen_BTE):
    """Computes KL(p || softmax(scores)), p in proportion to exp(log_mass), both over the seen entries.

    Args:
      log_mass_BTE: f32, of the teacher; no gradient. What is not seen may hold anything finite or -inf.
      scores_BTE: f32 index scores; likewise.
      seen_BTE: bool.
    Returns:
      f32 [B, T], 0 with zero gradient where nothing is seen. Logarithms throughout, so masses of 1e-30 count exactly.
    """
    counts = seen_BTE | ~seen_BTE.any(-1, keepdims=True)  # a row with nothing is made safe before the logarithm

    def log_softmax(x):
        x = jnp.where(seen_BTE, x, 0)
        return x - jax.nn.logsumexp(jnp.where(counts, x, -jnp.inf), axis=-1, keepdims=True)

    teacher = jax.lax.stop_gradient(log_softmax(log_mass_BTE))
    return jnp.sum(jnp.where(seen_BTE, jnp.exp(teacher), 0) * (teacher - log_softmax(scores_BTE)), axis=-1)


def balance(logits_BTE, expert_BTK, document_BT, *, cfg: Config):
    """Sums the balance loss of every document, times its tokens (DeepSeek-V3 report 2.1.2: sum over experts of f P).

    f is an expert's share of a document's routes times the number of experts, without gradient; P is the mean of its
    score, scores of a token summing to 1.

    Args:
      logits_BTE: f32 router logits.
      expert_BTK: i32 chosen experts.
      document_BT: i32, -1 where there is no token; numbers are below T.
    Returns:
      f32 scalar: a document of n evenly routed tokens has n; and f32 [E], routes of each expert.
    """
    _, T, E = logits_BTE.shape
    scores = moe.score(logits_BTE, cfg=cfg)
    scores = scores / (scores.sum(-1, keepdims=True) + jnp.float32(1e-20))
    valid = (document_BT >= 0)[..., None]
    routes = jnp.where(valid, jax.nn.one_hot(expert_BTK, E, dtype=jnp.int32).sum(2), 0)
    column = jnp.arange(T, dtype=jnp.int32)
    begins = jnp.diff(document_BT, axis=1, prepend=jnp.int32(-2)) != 0
    ends = jnp.diff(document_BT, axis=1, append=jnp.int32(-2)) != 0
    first = jax.lax.cummax(jnp.where(begins, column, 0), axis=1)
    last = jax.lax.cummin(jnp.where(ends, column, T - 1), axis=1, reverse=True)
    before = jnp.pad(jnp.cumsum(routes, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    count = jnp.take_along_axis(before, last[..., None] + 1, axis=1) - jnp.take_along_axis(
        before, first[..., None], axis=1
    )
    tokens = (last - first + 1)[..., None]
    # The sum over a document of f times its mean P is that of f times each token's own score.
    frequency = count.astype(jnp.float32) * jnp.float32(E / expert_BTK.shape[-1]) / tokens.astype(jnp.float32)
    return jnp.sum(jnp.where(valid, frequency * scores, 0)), routes.sum((0, 1)).astype(jnp.float32)
