"""Drawing tokens: a row's draw depends on its settings, its key, the token's position and its logits, nothing else.

Settings are arrays, so one program serves rows of any settings. Greedy choice is the distribution that has all its
weight on the best token, and so follows the same path, exactly.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

ACCEPTANCE, DRAFT = 1, 2  # folded into a position's key for draws other than the token's own
ALTERNATIVES = 20  # most best tokens reported beside each one made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 0.0  # 0 takes the best token, the lowest id on ties
    top_k: int = 0  # keep the k best tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest best tokens whose probabilities reach this sum
    alternatives: int = 0  # report so many best tokens beside each token made, 0 to ALTERNATIVES

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}; it must be 0 (greedy) or more, and finite")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k={self.top_k}; it must be 0 (all tokens) or more, below 2^31")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must be over 0 and at most 1")
        if not 0 <= self.alternatives <= ALTERNATIVES:
            raise ValueError(f"alternatives={self.alternatives}; legal are 0 to {ALTERNATIVES}")


class Rows(NamedTuple):
    """`Sampling` and a random key for each row of a batch."""

    temperature_B: jax.Array  # f32
    top_k_B: jax.Array  # i32
    top_p_B: jax.Array  # f32
    key_B: jax.Array  # typed keys
    alternatives_B: jax.Array  # i32


class Made(NamedTuple):
    """Tokens made, [B, T], and what the model itself thought of them, before temperature and cuts."""

    token_BT: jax.Array  # i32, -1 behind a row's tokens
    logprob_BT: jax.Array  # f32, ln of the probability of each; 0 behind them
    best_BTA: jax.Array  # i32, the best tokens, best first, the lower id on ties; zeros unless a row asks for them
    best_logprob_BTA: jax.Array  # f32


def rows(settings: Sequence[Sampling], key_B) -> Rows:
    """Stacks the settings of each row beside its key."""
    return Rows(
        jnp.array([s.temperature for s in settings], jnp.float32),
        jnp.array([s.top_k for s in settings], jnp.int32),
        jnp.array([s.top_p for s in settings], jnp.float32),
        key_B,
        jnp.array([s.alternatives for s in settings], jnp.int32),
    )


def row_keys(seed: int, batch: int):
    """Makes a key per row of the seed and the row's place in the batch."""
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    return fold(jax.random.key(seed), jnp.arange(batch, dtype=jnp.int32))


def position_keys(key_B, position_BT):
    """Makes a key for each of a row's i32 positions."""
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))(key_B, position_BT)


def _fold(key_BT, purpose: int):
    return jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(0, None))(key_BT, purpose)


def restrict(logits_BTV, rows: Rows):
    """Applies temperature, then top-k, then top-p of what it left: f32 [B, T, V], -inf where no draw may fall.

    Among equal logits the lower id ranks higher. At temperature 0 only the best token is left.
    """
    temperature, top_k, top_p = (a[:, None, None] for a in rows[:3])
    greedy = temperature == 0
    logits = logits_BTV / jnp.where(greedy, 1, temperature)

    def cut(logits, top_k, top_p):
        order = jnp.argsort(-logits, axis=-1, stable=True)
        best = jnp.take_along_axis(logits, order, axis=-1)
        rank = jnp.arange(best.shape[-1], dtype=jnp.int32)
        best = jnp.where((rank < top_k) | (top_k == 0), best, -jnp.inf)
        probability = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        kept = jnp.sum((best > -jnp.inf) & (before < top_p), axis=-1, keepdims=True)
        return jnp.where(jnp.argsort(order, axis=-1) < kept, logits, -jnp.inf)

    cuts = jnp.any(~greedy & ((top_k > 0) | (top_p < 1)))  # a sort of the vocabulary, for those who ask only
    logits = jax.lax.cond(cuts, cut, lambda logits, *_: logits, logits, top_k, top_p)
    best = jnp.argmax(logits_BTV, axis=-1, keepdims=True)
    one = jnp.where(jnp.arange(logits.shape[-1], dtype=best.dtype) == best, jnp.float32(0), -jnp.inf)
    return jnp.where(greedy, one, logits)


def draw(key_BT, logits_BTV):
    """Draws one token at each position from logits, -inf among them: i32 [B, T]."""
    return jax.vmap(jax.vmap(jax.random.categorical))(key_BT, logits_BTV).astype(jnp.int32)


def sample(logits_BV, rows: Rows, position_B):
    """Draws the token of each row that will stand at i32 position_B: i32 [B]."""
    key_BT = position_keys(rows.key_B, position_B[:, None])
    return draw(key_BT, restrict(logits_BV[:, None], rows))[:, 0]


def report(token_BT, logits_BTV, rows: Rows) -> Made:
    """Looks up what the model thought of tokens i32 [B, T], -1 where none, in its own logits."""
    logprob_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    logprob_BT = jnp.take_along_axis(logprob_BTV, jnp.maximum(token_BT, 0)[..., None], axis=-1)[..., 0]
    most = min(ALTERNATIVES, logits_BTV.shape[-1])

    def best(logprob_BTV):
        logprob_BTA, token_BTA = jax.lax.top_k(logprob_BTV, most)
        return token_BTA.astype(jnp.int32), logprob_BTA

    def none(logprob_BTV):
        shape = (*logprob_BTV.shape[:2], most)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    asked = jnp.any(rows.alternatives_B > 0)  # a sort of the vocabulary, as in `restrict`
    return Made(token_BT, jnp.where(token_BT >= 0, logprob_BT, 0), *jax.lax.cond(asked, best, none, logprob_BTV))


def sample_draft(logits_BV, rows: Rows, position_B):
    """Draws a draft for i32 position_B: i32 [B], and the logits [B, V] it was drawn from, as `accept` takes them."""
    logits = restrict(logits_BV[:, None], rows)
    return draw(_fold(position_keys(rows.key_B, position_B[:, None]), DRAFT), logits)[:, 0], logits[:, 0]


def accept(target_BTV, draft_BTV, token_BT, count_B, key_BT):
    """Accepts drafts by rejection sampling, so that tokens have the target's distribution exactly.

    Args:
      target_BTV: f32 [B, n + 1, V] from `restrict`, of the model, at the drafts and behind the last.
      draft_BTV: f32 [B, n, V] from `restrict`, what each draft was drawn from.
      token_BT: i32 [B, n] drafts.
      count_B: i32, drafts to consider, 0..n.
      key_BT: [B, n + 1] keys of the positions.
    Returns:
      i32 [B] drafts accepted, 0..count, and i32 [B] the token drawn behind them: of what the target has more of than
      the draft where one was rejected, of the target where none was. Where both are greedy, the longest agreeing
      prefix and the target's best token.
    Source: architecture section 9; Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    n = token_BT.shape[1]
    target, proposed = jax.nn.softmax(target_BTV, axis=-1), jax.nn.softmax(draft_BTV, axis=-1)
    proposed = jnp.pad(proposed, ((0, 0), (0, 1), (0, 0)))  # nothing is proposed behind the last draft

    def of_token(probability):
        return jnp.take_along_axis(probability[:, :n], token_BT[..., None], axis=-1)[..., 0]

    uniform_BT = jax.vmap(jax.vmap(jax.random.uniform))(_fold(key_BT[:, :n], ACCEPTANCE))
    considered_BT = jnp.arange(n, dtype=jnp.int32) < count_B[:, None]
    kept_BT = considered_BT & (uniform_BT * of_token(proposed) < of_token(target))
    accepted_B = jnp.sum(jnp.cumprod(kept_BT.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)

    def there(array):
        return jnp.take_along_axis(array, accepted_B.reshape(-1, *[1] * (array.ndim - 1)), axis=1)[:, 0]

    target_BV = there(target)
    rest_BV = jnp.maximum(target_BV - jnp.where((accepted_B < count_B)[:, None], there(proposed), 0), 0)
    # Rounding may leave nothing of two distributions that are all but equal.
    rest_BV = jnp.where(jnp.sum(rest_BV, axis=-1, keepdims=True) > 0, rest_BV, target_BV)
    key_B = jnp.take_along_axis(key_BT, accepted_B[:, None], axis=1)
    return accepted_B, draw(key_B, jnp.log(rest_BV)[:, None])[:, 0]
